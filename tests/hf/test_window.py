"""A window policy equals the model with a window mask, however the tokens are split into chunks."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.pairwise import pairwise
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import UnsupportedError

LENGTH, PADS = 80, 20
WINDOWS, STORAGES = [(16, 0), (16, 4)], ["growing", "fixed", "concat"]
NEAR = {"atol": 2e-5, "rtol": 1e-5}
"""To the float64 logits. The tiny model's large weights enlarge rounding: transformers' own float32
forward is off by 1.3e-5. SmolLM2 is held to 1e-5."""


def window_mask(length: int, size: int, sinks: int) -> torch.Tensor:
    """Additive (1, 1, length, length): causal, within `size` or among the first `sinks`."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (key <= query) & ((query - key < size) | (key < sinks))
    return torch.zeros(1, 1, length, length).masked_fill(~seen, -torch.inf)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def exact(model):
    return deepcopy(model).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, 96, (2, LENGTH + PADS), generator=torch.Generator().manual_seed(2))


def reference(model, ids, size, sinks):
    mask = window_mask(ids.shape[1], size, sinks).to(model.dtype)
    return model(ids, attention_mask=mask, use_cache=False).logits.float()


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "storage", "chunk"), pairwise(WINDOWS, STORAGES, [1, 7, 64, LENGTH])
)
def test_one_row(model, exact, ids, window, storage, chunk):
    size, sinks = window
    row = ids[:1, :LENGTH]
    expected = reference(exact, row, size, sinks)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, f"window:{size},sinks={sinks}@{storage}")
        logits = [model(c, past_key_values=cache).logits for c in row.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **NEAR)
    assert cache.length == size + sinks
    if storage == "fixed":
        assert cache.capacity == size + sinks
        assert cache.stats().reallocations == 0


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "storage", "chunk"), pairwise(WINDOWS, STORAGES, [1, 7, 64, LENGTH + PADS])
)
def test_ragged_batch_equals_its_rows_alone(model, exact, ids, window, storage, chunk):
    size, sinks = window
    mask = torch.ones_like(ids)
    mask[0, :PADS] = 0
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, f"window:{size},sinks={sinks}@{storage}")
        logits = []
        for start in range(0, ids.shape[1], chunk):
            stop = min(start + chunk, ids.shape[1])
            output = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position[:, start:stop],
                past_key_values=cache,
            )
            logits.append(output.logits)
    both = torch.cat(logits, dim=1)
    alone = reference(exact, ids[:1, PADS:], size, sinks), reference(exact, ids[1:], size, sinks)
    torch.testing.assert_close(both[0, PADS:], alone[0][0], **NEAR)
    torch.testing.assert_close(both[1], alone[1][0], **NEAR)
    assert cache.seen.tolist() == [LENGTH, LENGTH + PADS]


@torch.no_grad()
def test_unattached_is_right_or_raises(model, ids):
    row = ids[:1, :40]
    cache = kvkeep.Cache(model, "window:16")
    model(row[:, :16], past_key_values=cache)
    steps = [model(row[:, i : i + 1], past_key_values=cache).logits for i in range(16, 40)]
    expected = reference(model, row, 16, 0)[:, 16:]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=5e-5, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="attach"):
        model(row[:, :2], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="attach"):
        model(ids, past_key_values=kvkeep.Cache(model, "window:16"))
    assert cache.fed == 40
    with_sinks = kvkeep.Cache(model, "window:16,sinks=4")  # the columns of padding would be sinks
    model(row[:, :20], past_key_values=with_sinks)
    with pytest.raises(UnsupportedError, match="attach"):
        model(row[:, 20:21], past_key_values=with_sinks)


@torch.no_grad()
def test_unattached_window_as_large_as_the_layers_own_but_with_sinks(ids):
    model = tiny("mistral")
    cache = kvkeep.Cache(model, "window:6,sinks=2")  # 8 slots, like the layer's window of 8
    with pytest.raises(UnsupportedError, match="attach"):
        model(ids[:1], past_key_values=cache)


@pytest.fixture(scope="module")
def text(smollm2):
    """Tokens, and what SmolLM2 says of them with a window mask."""
    model, tokenizer = smollm2
    words = "The tide went out at noon, and the boats lay on the sand like sleeping dogs. " * 6
    row = tokenizer(words, return_tensors="pt").input_ids[:, :96]
    with torch.no_grad():
        return row, reference(model, row, 24, 4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("storage", "chunk"),
    [
        ("fixed", 7),
        *(
            pytest.param(storage, chunk, marks=pytest.mark.slow)
            for storage, chunk in (
                ("growing", 1),
                ("growing", 7),
                ("growing", 32),
                ("fixed", 1),
                ("fixed", 96),
            )
        ),
    ],
)
def test_smollm2(smollm2, text, storage, chunk):
    (model, _), (row, expected) = smollm2, text
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, f"window:24,sinks=4@{storage}")
        logits = [model(c, past_key_values=cache).logits for c in row.split(chunk, dim=1)]
    scale = expected.abs().max()
    torch.testing.assert_close(
        torch.cat(logits, dim=1) / scale, expected / scale, atol=1e-5, rtol=0
    )
