"""How many functions of kvkeep a decode step calls: in Python each costs about a microsecond, and
ten where weights have displaced it from the processor's caches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep import native_library

ROOT = str(Path(kvkeep.Cache.update.__code__.co_filename).parents[1])
POLICIES = [
    "window:16",
    "h2o:16",
    "h2o:16+int8",
    "vlen:16",
    "qh2o:16+int8",
    "tova:16",
    "snapkv:16,window=4",
    "knorm:16",
    "keydiff:16",
    "random:16",
    "adakv(h2o:16)",
    "keep_all+kivi",
]


@torch.no_grad()
def called(spec: str) -> tuple[int, int]:
    """The calls before the first of three layers, and those of the second."""
    model = tiny("llama", num_hidden_layers=3)
    kvkeep.attach(model, spec)
    cache, token = kvkeep.Cache(model, spec), torch.tensor([[5]])
    model(torch.arange(3, 40)[None], past_key_values=cache)
    for _ in range(4):
        model(token, past_key_values=cache)
    names: list[str] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    model(token, past_key_values=cache)
    sys.setprofile(None)
    first, second, third = (i for i, name in enumerate(names) if name == "Cache.update")
    return first, third - second


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.parametrize("spec", ["keep_all", *POLICIES])
def test_a_step_calls_few_functions(spec: str) -> None:
    before, layer = called(spec)
    assert layer <= (15 if spec == "keep_all" else 25)
    assert before <= 60 + 10 * (spec != "keep_all")
