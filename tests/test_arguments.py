"""An argument that a function does not have: the error names the nearest one."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import ArgumentError


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: kvkeep.attach(m, linear=True), r"attach\(\) .*'linear'; did you mean 'linears'"),
        (
            lambda m: kvkeep.attach(m, capacity=9),
            r"did you mean 'capacity' of kvkeep.hf.Cache\(\)\?",
        ),
        (lambda m: kvkeep.Cache(m, capacty=9), r"Cache\(\) .*; did you mean 'capacity'"),
        (lambda m: kvkeep.Cache(m, zz=9), "there is model, spec, capacity$"),
        (lambda m: kvkeep.PrefixStore(bugdet=9), "did you mean 'budget'"),
        (
            lambda m: kvkeep.generate_many(m, [[5]], max_token=9),
            r"'max_new_tokens' of kvkeep.generate.SamplingParams",
        ),
        (
            lambda m: kvkeep.Batch(m).add([5], temperature=1.0),
            r"'temperature' of kvkeep.generate.SamplingParams\(\)",
        ),
    ],
)
def test_the_nearest_argument(model, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(model)
    assert not hasattr(model, "_kvkeep_attachment")
    kvkeep.attach(model)  # it was left alone
    kvkeep.detach(model)


def test_the_signature_stays():
    assert list(inspect.signature(kvkeep.Cache).parameters) == ["model", "spec", "capacity"]
    assert issubclass(ArgumentError, TypeError)


def tensors(n: int) -> dict[str, dict[str, object]]:
    ids = torch.arange(2, 2 + n)
    return {
        "ids": {"input_ids": ids},
        "list": {"input_ids": ids.tolist()},
        "mask": {"input_ids": ids[None], "attention_mask": torch.ones(n)},
        "embeds": {"inputs_embeds": torch.zeros(n, 32)},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ids", r"input_ids has the shape \(6,\), without rows; give \(B, n\): .*ids\[None\]"),
        ("list", r"input_ids is a list; give a tensor \(B, n\)"),
        ("mask", r"attention_mask has the shape \(6,\).*mask\[None\]"),
        ("embeds", r"inputs_embeds has the shape \(6, 32\).*\(B, n, width\): .*embeds\[None\]"),
    ],
)
@pytest.mark.parametrize("spec", ["keep_all", "h2o:8"])
def test_tensors_without_rows(model, given, message, spec):
    tokens = tensors(6)[given]
    with kvkeep.attach(model, spec), torch.no_grad():
        cache = kvkeep.Cache(model, spec)
        calls = (
            lambda: model(**tokens),
            lambda: model(**tokens, past_key_values=cache),
            lambda: model.generate(**tokens, max_new_tokens=2),
            lambda: model.generate(**tokens, past_key_values=cache, max_new_tokens=2),
        )
        for call in calls:
            with pytest.raises(kvkeep.ShapeError, match=message):
                call()
        assert cache.fed == 0
        with pytest.raises(kvkeep.ShapeError, match=r"inputs has the shape \(6,\).*ids\[None\]"):
            model.generate(torch.arange(6), max_new_tokens=2)
