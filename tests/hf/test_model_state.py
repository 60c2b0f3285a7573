"""The key of compiled steps: what two models share if and only if one program can serve both."""

from __future__ import annotations

import functools
import types
from collections import deque

import pytest
import torch
from support.slow import every
from support.tiny_models import FAMILIES, tiny
from torch import nn
from transformers.models.llama import modeling_llama

import kvkeep
from kvkeep.hf.steps.model_state import ModelState


def model_with(part):
    model = tiny("llama", num_hidden_layers=1)
    model.model.norm = part
    return model


def norm(scale, way):
    """A module that multiplies by `scale`, which its code reaches in some way."""
    place = {"torch": torch, "nn": nn, "scale": scale, "__name__": "a_users_file"}
    program = {
        "base": "class B(nn.Module):\n def forward(self, x): return x * SCALE\n"
        "class M(B):\n def forward(self, x): return super().forward(x)",
        "method": "class M(nn.Module):\n def pow(self, x): return x * SCALE\n"
        " def forward(self, x): return self.pow(x)",
        "child": "class C(nn.Module):\n def route(self, x): return x * SCALE\n"
        "class M(nn.Module):\n def __init__(self):\n  super().__init__(); self.c = C()\n"
        " def forward(self, x): return self.c.route(x)",
        "module": "import ops\nclass M(nn.Module):\n def forward(self, x): return ops.f(x)",
        "helper": "class T:\n K = SCALE\n def f(x): return x * SCALE\n"
        "class M(nn.Module):\n def forward(self, x): return T.f(x)",
        "global": "S = (SCALE, 1.0)\nclass M(nn.Module):\n def forward(self, x): return x * S[0]",
        "partial": "class M(nn.Module):\n def g(self, s, x): return x * s\n"
        " h = functools.partialmethod(g, SCALE)\n def forward(self, x): return self.h(x)",
        "lambda": "f = lambda x: x * SCALE\n"
        "class M(nn.Module):\n def forward(self, x): return f(x)",
    }[way].replace("SCALE", repr(scale))
    if way == "module":
        ops = types.ModuleType("ops")
        exec(f"def f(x): return x * {scale!r}", vars(ops))
        program, place["ops"] = program.partition("\n")[2], ops
    place["functools"] = functools
    exec(program, place)
    return place["M"]()


@pytest.mark.parametrize(
    "way", ["base", "method", "child", "module", "helper", "global", "partial", "lambda"]
)
def test_code_that_a_forward_reaches(way):
    first, again, other = (
        ModelState(model_with(norm(scale, way))).key() for scale in (2.0, 2.0, 3.0)
    )
    assert first == again != other
    assert first is not None
    state = ModelState(model_with(norm(2.0, way)))
    assert state.unchanged()


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slice(0, 4), slice(0, 8)),
        (range(4), range(8)),
        ((1, 2), (1, 3)),
        ({"a": [1]}, {"a": [2]}),
        (Scaler(2.0), Scaler(3.0)),
        (Scaler(2.0).apply, Scaler(3.0).apply),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (torch.float32, torch.float16),
    ],
)
def test_values_that_a_module_holds(first, second):
    keys = []
    for value in (first, first, second):
        part = nn.Identity()
        part.held = value
        keys.append(ModelState(model_with(part)).key())
    assert keys[0] == keys[1] != keys[2]
    assert None not in keys


class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)


class Slotted:
    __slots__ = ("scale",)


@pytest.mark.parametrize(
    "value", [deque([1]), [nn.LeakyReLU(0.1)], Slotted(), (x for x in ()), memoryview(b"")]
)
def test_objects_of_which_nothing_is_known(value):
    part = nn.Identity()
    part.held = value
    state = ModelState(model_with(part))
    assert state.key() is None
    assert state.unchanged()


def test_objects_that_raise_refer_to_themselves_or_have_no_memory():
    part = nn.Identity()
    part.held, part.itself = Odd(), []
    part.itself += [part.itself, part]
    part.register_buffer("sparse", torch.eye(2).to_sparse())
    state = ModelState(model_with(part))
    assert state.key() == ModelState(model_with(part)).key()
    assert state.unchanged()
    with kvkeep.attach(model_with(nn.Identity())):
        pass


def test_a_base_class_that_is_patched(monkeypatch):
    class Own(modeling_llama.LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) * 2

    model = tiny("llama", num_hidden_layers=1)
    model.model.norm = Own(model.config.hidden_size)
    state = ModelState(model)
    assert state.unchanged()
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x)
    assert not state.unchanged()


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_attached_models_have_the_same_key(family):
    model = tiny(family)
    key = ModelState(model).key()
    assert key is not None
    with kvkeep.attach(model):
        assert ModelState(model).key() == key
