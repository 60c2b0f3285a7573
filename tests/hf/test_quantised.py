"""Models whose weights torchao or bitsandbytes has quantised, attached."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny_models import tiny
from torch import nn

import kvkeep
from kvkeep import native_library
from kvkeep.errors import ModelError, UnsupportedError
from kvkeep.hf.quantised import quantise
from kvkeep.hf.steps.compiled import key_of

torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.usefixtures("without_gradients")

IDS = torch.randint(2, 90, (1, 24), generator=torch.Generator().manual_seed(5))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 256}


def answer(model):
    """The logits of a prompt and of four steps, (1, 5, V)."""
    out = model(IDS[:, :-4], use_cache=True)
    found = [out.logits[:, -1:]]
    for token in IDS[:, -4:].split(1, dim=1):
        out = model(token, past_key_values=out.past_key_values)
        found.append(out.logits)
    return torch.cat(found, dim=1)


def require_equal_but_for_rounding(model, linears, tolerance, compile=False):
    """What the attached model computes is what its library computes without kvkeep."""
    expected = answer(model)
    with kvkeep.attach(model, compile=compile) as attachment:
        assert attachment.linears == linears
        found = answer(model)
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert answer(model).equal(expected)


def linear_layers(model):
    return sum(type(module) is nn.Linear for module in model.modules())


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_codes_of_eight_bits_are_read_in_place(dtype, tolerance):
    model = tiny("llama", **SIZES).to(dtype)
    assert quantise(model, "int8") == linear_layers(model)
    require_equal_but_for_rounding(model, linear_layers(model), tolerance)
    assert key_of(model) is None  # programs read plain weights by their addresses


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_compiled_steps(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path))
    model = tiny("llama", **SIZES)
    quantise(model, weights)
    linears = linear_layers(model) if weights == "int8" else 0
    require_equal_but_for_rounding(model, linears, 1e-2, compile=True)


@pytest.mark.parametrize(
    "config",
    [
        torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
        torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor()),
        torchao.Int8DynamicActivationInt8WeightConfig(),
        torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
    ],
    ids=["groups", "one scale", "dynamic", "int4 in bytes"],
)
def test_what_kvkeep_cannot_read_is_left_to_torchao(config):
    model = tiny("llama", **SIZES).to(torch.bfloat16)
    torchao.quantize_(model, config)
    require_equal_but_for_rounding(model, 0, 0.05)


def test_zero_points_are_not_dropped():
    model = tiny("llama", **SIZES)
    quantise(model, "int8")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.zero_point.fill_(3)
    require_equal_but_for_rounding(model, linear_layers(model) - 1, 1e-5)


def test_four_bits():
    model = tiny("llama", **SIZES).to(torch.bfloat16)
    assert quantise(model, "int4") == linear_layers(model)
    require_equal_but_for_rounding(model, 0, 0.05)


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp4"])
def test_bitsandbytes(kind):
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny("llama", **SIZES)
    for name, layer in list(model.model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        weight = layer.weight.data.clone()
        if kind == "int8":
            made = bnb.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            made = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=torch.float32)
            made.weight = bnb.nn.Params4bit(
                weight, requires_grad=False, quant_type=kind, module=made
            )
        model.model.set_submodule(name, made.to("cpu"))
    answer(model)  # its first forward may arrange the weights anew
    require_equal_but_for_rounding(model, 1, 0.05)  # the output layer is plain


def test_what_cannot_be_quantised():
    model = tiny("llama", **SIZES)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="weights 'int3': give one of int8, int4"):
        quantise(model, "int3")
    odd = tiny("llama", hidden_size=24, intermediate_size=40, head_dim=12)
    with pytest.raises(UnsupportedError, match="no linear layer of LlamaForCausalLM"):
        quantise(odd, "int4")
    model.is_quantized = True
    with pytest.raises(UnsupportedError, match="they are quantised already"):
        quantise(model, "int8")
    assert all(model.state_dict()[name].equal(x) for name, x in before.items())
