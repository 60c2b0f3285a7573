"""Models whose weights torchao or bitsandbytes has quantised, attached."""

from __future__ import annotations

import copy
import importlib
import json
import os

import pytest
import torch
from support.tiny_models import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)
from transformers.quantizers import quantizer_gptq

import kvkeep
from kvkeep import native_library
from kvkeep.errors import MissingPackageError, ModelError, UnsupportedError
from kvkeep.generate import SamplingParams
from kvkeep.graph.package import Package
from kvkeep.hf.models import load
from kvkeep.hf.quantised import quantise
from kvkeep.hf.steps import saved_steps
from kvkeep.store import PrefixStore

torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.usefixtures("without_gradients", "own_directory")

IDS = torch.randint(2, 90, (1, 24), generator=torch.Generator().manual_seed(5))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 256}


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """Libraries such as gptqmodel write logs to the current directory."""
    monkeypatch.chdir(tmp_path)


def answer(model):
    """The logits of a prompt and of four steps, (1, 5, V)."""
    out = model(IDS[:, :-4], use_cache=True)
    found = [out.logits[:, -1:]]
    for token in IDS[:, -4:].split(1, dim=1):
        out = model(token, past_key_values=out.past_key_values)
        found.append(out.logits)
    return torch.cat(found, dim=1)


def greedy(model):
    return model.generate(IDS, max_new_tokens=4, do_sample=False)[0, IDS.shape[1] :].tolist()


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


@pytest.mark.slow
@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_compiled_steps(weights, tmp_path, monkeypatch):
    """A program serves the model that compiled it, and another one with other weights."""
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path))
    model = tiny("llama", **SIZES)
    quantise(model, weights)
    linears = linear_layers(model) if weights == "int8" else 0
    require_equal_but_for_rounding(model, linears, 1e-5, compile=True)
    assert len(saved_steps.files_of("*")) == 1
    other = tiny("llama", **SIZES)
    other.model.layers[0].mlp.up_proj.weight.mul_(2)
    quantise(other, weights)
    runs, run = [], Package.__call__
    monkeypatch.setattr(Package, "__call__", lambda *given: runs.append(1) or run(*given))
    require_equal_but_for_rounding(other, linears, 1e-5, compile=None)
    assert len(runs) == 4
    part = "qdata" if hasattr(other.model.layers[0].mlp.up_proj.weight, "qdata") else "scale"
    with kvkeep.attach(other):
        before = answer(other)
        weight = other.model.layers[0].mlp.up_proj.weight
        setattr(weight, part, getattr(weight, part).flip(0).contiguous())
        changed = answer(other)  # the program reads the new codes
    assert not changed.equal(before)
    assert (changed - answer(other)).norm() <= 1e-5 * changed.norm()


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


def saved(model, kind, place):
    """Save a model as its library quantises it, and return the place."""
    model.save_pretrained(place / "plain")
    if kind in ("gptq", "awq"):
        return saved_by_gptqmodel(kind, place)
    if kind == "torchao":
        config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes")
        nested = {"bnb_4bit_use_double_quant": kind == "nested nf4"}
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": kind[-3:], **nested}
        options["bnb_4bit_compute_dtype"] = torch.float32
        config = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else options))
    loaded(place / "plain", quantization_config=config).save_pretrained(place / kind)
    return place / kind


def saved_by_gptqmodel(kind, place):
    """As `saved`: weights are chosen by how the model reads a few texts."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer it cannot load models
    pytest.importorskip("optimum")
    gptqmodel = pytest.importorskip("gptqmodel")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    tokenizer.save_pretrained(place / "plain")
    options = {"bits": 4, "group_size": 32, "device": "cpu"}
    if kind == "awq":
        kinds = importlib.import_module("gptqmodel.quantization")
        options |= {"method": kinds.METHOD.AWQ, "format": kinds.FORMAT.GEMM}
    config = gptqmodel.QuantizeConfig(**options)
    made = gptqmodel.GPTQModel.load(str(place / "plain"), config)
    texts = torch.randint(2, 90, (8, 64), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.enable_grad():
        made.quantize([{"input_ids": x, "attention_mask": [1] * 64} for x in texts], batch_size=1)
    made.save(str(place / kind))
    return place / kind


def loaded(place, **options):
    return LlamaForCausalLM.from_pretrained(
        place, device_map="cpu", dtype=torch.float32, **options
    ).eval()


LOADED = [
    *("torchao", "int8", "nf4", "fp4", "nested nf4"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gptq", "awq")),
]


@pytest.mark.parametrize("kind", LOADED)
def test_loaded_models(kind, tmp_path):
    """Steps, texts, batches, stores and files of a model that transformers loads quantised."""
    place = saved(tiny("llama", **SIZES), kind, tmp_path)
    model, other = loaded(place), loaded(place)
    tolerance = 0.02 if kind == "int8" else 1e-4  # its activations have 8 bits too
    expected, text = answer(model), greedy(model)
    for linears in (True, False):
        with kvkeep.attach(model, linears=linears):
            assert (answer(model) - expected).norm() <= tolerance * expected.norm()
            assert greedy(model) == text
    with kvkeep.attach(model):
        prompts = [IDS[0].tolist(), IDS[0, :9].tolist()]
        many = kvkeep.generate_many(model, prompts, SamplingParams(max_new_tokens=4))
        assert many[0][0].tokens == text
        store = PrefixStore()
        cache = store.read(model, IDS).cache
        cache.save(tmp_path / "a.kv")
    with kvkeep.attach(other):
        assert store.read(other, IDS).found == IDS.shape[1]
        again = kvkeep.load(tmp_path / "a.kv", other)
        steps = [x(IDS[:, -1:], past_key_values=y).logits for x, y in ((other, again),)]
    with kvkeep.attach(model):
        steps.append(model(IDS[:, -1:], past_key_values=cache).logits)
    assert steps[0].equal(steps[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4", "nested nf4", "gptq", "awq"])
def test_compiled_steps_of_loaded_models(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path))
    model = loaded(saved(tiny("llama", **SIZES), kind, tmp_path))
    expected = answer(model)
    with kvkeep.attach(model, compile=True):
        if kind == "int8":  # the columns that it computes in 16 bits depend on the activations
            cache = kvkeep.Cache(model)
            model(IDS[:, :-4], past_key_values=cache)
            with pytest.raises(UnsupportedError, match="torch cannot compile a step"):
                model(IDS[:, -4:-3], past_key_values=cache)
            assert cache.seen.tolist() == [IDS.shape[1] - 4]
        else:
            assert (answer(model) - expected).norm() <= 1e-2 * expected.norm()
    assert answer(model).equal(expected)


@pytest.mark.parametrize("kind", ["torchao", "int8", "nf4"])
def test_programs_are_refused_before_they_are_written(kind, tmp_path):
    model = loaded(saved(tiny("llama", **SIZES), kind, tmp_path))
    before = answer(model)
    with pytest.raises(UnsupportedError, match="export"):
        kvkeep.export(model, "keep_all@fixed:64")
    assert answer(model).equal(before)


def test_a_model_whose_library_is_missing(tmp_path, monkeypatch):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    monkeypatch.setattr(quantizer_gptq, "is_optimum_available", lambda: False)
    with pytest.raises(MissingPackageError, match=r"requires optimum \(`pip install optimum`\)$"):
        load(str(tmp_path))


def test_what_cannot_be_quantised():
    model = tiny("llama", **SIZES)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="weights 'int3': give one of int8, int4"):
        quantise(model, "int3")
    odd = tiny("llama", hidden_size=24, intermediate_size=40, head_dim=12)
    with pytest.raises(UnsupportedError, match="no linear layer of LlamaForCausalLM"):
        quantise(odd, "int4")
    model.is_quantized = True
    with pytest.raises(UnsupportedError, match="they are already quantised"):
        quantise(model, "int8")
    assert all(model.state_dict()[name].equal(x) for name, x in before.items())
