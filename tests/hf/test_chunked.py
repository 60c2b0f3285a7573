"""Chunked attention (Llama 4) against the model without kvkeep."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.tiny_models import WINDOW, tiny

import kvkeep
from kvkeep.errors import UnsupportedError

NEAR = {"atol": 3e-5, "rtol": 1e-4}
LENGTH = 21  # ends in the third chunk
GREEDY = {"max_new_tokens": 2 * WINDOW, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return tiny("llama4")


@pytest.fixture(scope="module")
def exact(model):
    return deepcopy(model).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, 96, (2, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def mask():
    """Row 0 has padding, so that its chunks begin in other columns."""
    shown = torch.ones(2, LENGTH, dtype=torch.long)
    shown[0, :5] = 0
    return shown


def texts(model, ids, **options):
    return model.generate(ids, **GREEDY, **options)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 5, WINDOW, LENGTH])
@pytest.mark.parametrize("spec", ["keep_all", "keep_all@fixed"])
def test_logits(model, exact, ids, spec, chunk):
    expected = exact(ids, use_cache=False).logits.float()
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        found = [model(part, past_key_values=cache).logits for part in ids.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **NEAR)
    assert cache.layers[0].length <= WINDOW
    assert cache.layers[1].length == LENGTH


@torch.no_grad()
@pytest.mark.parametrize("chunk", [6, LENGTH])
def test_rows_with_padding(model, exact, ids, mask, chunk):
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = exact(ids, attention_mask=mask, position_ids=position, use_cache=False).logits
    found = []
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        for start in range(0, LENGTH, chunk):
            stop = min(start + chunk, LENGTH)
            part = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position[:, start:stop],
                past_key_values=cache,
            )
            found.append(part.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, dim=1)[real], expected.float()[real], **NEAR)


@torch.no_grad()
def test_text(model, ids, mask):
    alone = texts(model, ids[:1], use_cache=False)
    padded = texts(model, ids, attention_mask=mask, use_cache=False)
    with pytest.raises(UnsupportedError, match="chunks begin where padding ends"):
        texts(model, ids[:1], past_key_values=kvkeep.Cache(model))  # it may be padded
    with kvkeep.attach(model):
        assert texts(model, ids[:1]).equal(alone)
        assert texts(model, ids, attention_mask=mask).equal(padded)


@torch.no_grad()
def test_budgets(model, ids):
    """A policy keeps its budget of what later tokens can see."""
    with kvkeep.attach(model, "h2o:6,recent=2"):
        found = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    chunked, full = found.past_key_values.layers
    assert (chunked.length, full.length) == (6, 6)
    newest = LENGTH + GREEDY["max_new_tokens"] - 2
    inside = newest % WINDOW + 1  # those that lie in the newest chunk
    assert int((chunked.positions() > newest - inside).sum(dim=2).min()) == min(inside, 6)


@torch.no_grad()
@pytest.mark.parametrize("length", [LENGTH, 2 * WINDOW])
def test_saved_and_forked(model, ids, tmp_path, length):
    """Also where a chunk begins, so that the layer holds no slot."""
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        model(ids[:, :length], past_key_values=cache)
        fork = cache.freeze().fork()
        cache.crop(0)
        model(ids[:, :1], past_key_values=cache)
        cache.crop(-1)
        cache.save(tmp_path / "saved")
        again = kvkeep.load(tmp_path / "saved", model)
        found = [
            torch.cat([model(ids[:, i : i + 1], past_key_values=one).logits for i in range(9)], 1)
            for one in (cache, again, fork)
        ]
    assert torch.equal(*found[:2])
    assert torch.equal(found[0], found[2])
