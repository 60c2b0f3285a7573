"""Fingerprints of quantised weights: reading them changes nothing, and nothing is missed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from support.tiny_models import tiny
from torch import nn

import kvkeep
from kvkeep.host.fingerprint import sampled
from kvkeep.host.tensors import named_weights, weights
from kvkeep.store import PrefixStore

pytestmark = pytest.mark.usefixtures("without_gradients")

IDS = torch.randint(2, 90, (1, 24), generator=torch.Generator().manual_seed(5))


class Packing(nn.Module):
    """Like bitsandbytes' 4-bit layer on a CPU: the first forward arranges the weights anew, and
    writing a state dict arranges them as before, but for the scales, so what follows is garbage."""

    def __init__(self, layer):
        super().__init__()
        scales = layer.weight.abs().amax(dim=1) / 127
        self.weight = nn.Parameter((layer.weight / scales[:, None]).round().to(torch.int8), False)
        self.weight.quant_state = SimpleNamespace(scales=scales, packed=False)

    def forward(self, x):
        state = self.weight.quant_state
        if not state.packed:
            self.weight.data = self.weight.data.t().contiguous()
            state.scales, state.packed = state.scales.roll(1).bfloat16(), True
        return x @ (self.weight.to(x) * state.scales.roll(-1).to(x))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        state = self.weight.quant_state
        if state.packed:
            self.weight.data, state.packed = self.weight.data.t().contiguous(), False
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = state.scales


class Moving(nn.Module):
    """Like bitsandbytes' 8-bit layer: the first forward moves the scales from the weight to the
    module, and each forward leaves results there."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight, False)
        self.weight.SCB = layer.weight.abs().amax(dim=1)
        self.state = SimpleNamespace(SCB=None, idx=None)

    def forward(self, x):
        if self.state.SCB is None:
            self.state.SCB, self.weight.SCB = self.weight.SCB, None
        self.state.idx = x.abs().amax(dim=tuple(range(x.dim() - 1))).topk(2).indices
        return x @ self.weight.t() * self.state.SCB

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise AssertionError("a state dict was made")


class Held(nn.Module):
    """Like a layer of GPTQ, AWQ or HQQ: packed numbers in a buffer, scales in a dict."""

    def __init__(self, layer):
        super().__init__()
        scales = layer.weight.abs().amax(dim=1) / 127
        codes = (layer.weight / scales[:, None]).round().to(torch.int8)
        self.register_buffer("qweight", codes.view(torch.int16))
        self.meta = {"scale": scales}

    def state_dict(self, *args, **options):
        raise AssertionError("a state dict was made")

    def forward(self, x):
        return x @ (self.qweight.view(torch.int8).to(x) * self.meta["scale"][:, None]).t()


def quantised(model, kind):
    """A copy of a model, with other linear layers in its decoder layers."""
    made = copy.deepcopy(model)
    for name, module in list(made.model.named_modules()):
        if isinstance(module, nn.Linear):
            made.model.set_submodule(name, kind(module))
    return made.eval()


KINDS = (Packing, Moving, Held)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_weights_leaves_the_output_alone(tmp_path, kind):
    model = quantised(tiny("llama"), kind)
    expected = model(IDS).logits
    before = kvkeep.fingerprint(model)
    assert model(IDS).logits.equal(expected)
    sampled(model)
    kvkeep.fingerprint(model, glance=True)
    cache = PrefixStore().read(model, IDS).cache
    cache.save(tmp_path / "a.kv")
    kvkeep.load(tmp_path / "a.kv", model)
    assert model(IDS).logits.equal(expected)
    assert kvkeep.fingerprint(model) == kvkeep.fingerprint(model, glance=True) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_does_not_change_who_a_model_is(kind):
    model, untouched = (quantised(tiny("llama"), kind) for _ in range(2))
    before = kvkeep.fingerprint(model), sampled(model)
    model(IDS)
    assert (kvkeep.fingerprint(model), sampled(model)) == before
    assert (kvkeep.fingerprint(untouched), sampled(untouched)) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("glance", [False, True])
def test_other_weights_or_scales_are_another_model(kind, glance):
    one = tiny("llama")
    other = copy.deepcopy(one)
    weight = other.model.layers[0].mlp.up_proj.weight
    weight.copy_(weight.flip(0))
    model = quantised(one, kind)
    seen = {kvkeep.fingerprint(x)["weights"] for x in (one, model, quantised(other, kind))}
    assert len(seen) == 3
    layer = model.model.layers[0].mlp.up_proj
    if kind is Held:
        layer.meta["scale"].mul_(2)
    elif kind is Moving:
        layer.state.SCB.mul_(2)
    else:
        layer.weight.quant_state.scales.mul_(2)
    assert kvkeep.fingerprint(model, glance=glance)["weights"] not in seen


def test_a_second_process_finds_what_the_first_one_stored():
    """Before its first forward, a model looks up what it stored after one."""
    store = PrefixStore()
    first, second = (quantised(tiny("llama"), Packing) for _ in range(2))
    assert store.read(first, IDS).found == 0
    assert store.read(second, IDS).found == IDS.shape[1]


def test_the_names_of_weights_are_those_of_a_state_dict():
    for family in ("llama", "gemma3", "gpt2"):
        model = tiny(family, tie_word_embeddings=True)
        expected = model.state_dict(keep_vars=True)
        found = named_weights(model)
        assert list(found) == list(expected)
        assert all(found[name] is x for name, x in expected.items())
        assert dict(weights(list(model.named_modules()))).keys() <= expected.keys()


def bitsandbytes_layer(kind):
    bnb = pytest.importorskip("bitsandbytes")

    def made(layer):
        weight = layer.weight.data.clone()
        if kind == "int8":
            new = bnb.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
            new.state.threshold = 6.0
            new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            return new.to("cpu")
        new = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=torch.float32)
        nested = kind == "nested nf4"
        new.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=nested, module=new
        )
        return new.to("cpu")

    return made


def torchao_layer(_):
    torchao = pytest.importorskip("torchao.quantization")

    def made(layer):
        torchao.quantize_(wrapped := nn.Sequential(layer), torchao.Int8WeightOnlyConfig())
        return wrapped[0]

    return made


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        (bitsandbytes_layer, "nf4"),
        (bitsandbytes_layer, "nested nf4"),
        (bitsandbytes_layer, "int8"),
        (torchao_layer, "int8"),
    ],
)
def test_layers_of_libraries(library, kind, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    made = library(kind)
    model = quantised(tiny("llama", **sizes), made)
    untouched = copy.deepcopy(model)
    expected = model(IDS).logits
    before = kvkeep.fingerprint(model), sampled(model)
    assert model(IDS).logits.equal(expected)
    PrefixStore().read(model, IDS).cache.save(tmp_path / "a.kv")
    assert model(IDS).logits.equal(expected)
    assert (kvkeep.fingerprint(model, glance=True), sampled(model)) == before
    assert (kvkeep.fingerprint(untouched), sampled(untouched)) == before
    kvkeep.load(tmp_path / "a.kv", untouched)
    other = tiny("llama", **sizes)
    other.model.layers[1].mlp.down_proj.weight.mul_(2)
    other = quantised(other, made)
    assert kvkeep.fingerprint(other)["weights"] != before[0]["weights"]
    assert sampled(other) != before[1]
