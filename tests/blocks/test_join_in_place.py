"""Joined texts of models that add positions to embeddings: each keeps its own, from 0 on."""

from __future__ import annotations

import pytest
import torch
from support.joined_logits import expected
from support.random_ids import row
from support.sweep_configs import model_of
from support.tiny_models import tiny

import kvkeep
from kvkeep.blocks import join, prefill
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.host import Piece, host_of

NEAR = {"atol": 1e-4, "rtol": 1e-4}
LENGTHS, AFTER = (9, 20, 1, 7), 6


def texts(*lengths):
    return [row(n, seed)[None] for seed, n in enumerate(lengths, 3)]


@torch.no_grad()
def alone(model, text, spec="keep_all"):
    """A cache that was fed a text by itself."""
    cache = kvkeep.Cache(model, spec)
    model(text, past_key_values=cache)
    return cache


@torch.no_grad()
def fed(model, cache, text, *chunks):
    """The logits of a text that is fed in chunks."""
    parts = text.split(list(chunks or text.shape[1:]), dim=1)
    return torch.cat([model(x, past_key_values=cache).logits for x in parts], dim=1)


@pytest.fixture(scope="module")
def gpt2():
    """An attached model, and what joined texts and a window give it without kvkeep."""
    model = tiny("gpt2").eval()
    model.set_attn_implementation("eager")
    *parts, tail = texts(*LENGTHS, AFTER)
    wanted = {size: expected(model, parts, tail, kept=True, window=size) for size in (None, 12)}
    with kvkeep.attach(model):
        yield model, parts, tail, wanted


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bert", "xglm", "biogpt"])
@pytest.mark.parametrize("attached", [True, False])
def test_positions_begin_anew_in_each_text(kind, attached):
    model = model_of(kind)
    model.set_attn_implementation("eager")
    *parts, tail = texts(*LENGTHS, AFTER)
    wanted = expected(model, parts, tail, kept=True)
    if attached:
        kvkeep.attach(model)
    cache = join(model, [alone(model, part) for part in parts])
    assert cache.fed == cache.length == sum(LENGTHS)
    assert cache.layers[0].positions()[0, 0].tolist() == [*range(sum(LENGTHS))]
    torch.testing.assert_close(fed(model, cache, tail, 4, 1, 1), wanted, **NEAR)


def test_a_window_counts_the_tokens_of_all_texts(gpt2):
    model, parts, tail, wanted = gpt2
    cache = join(model, [alone(model, part) for part in parts], "window:12")
    found = fed(model, cache, tail, 4, 1, 1)
    assert cache.length == 12
    torch.testing.assert_close(found, wanted[12], **NEAR)


@pytest.mark.parametrize("spec", ["h2o:16", "snapkv:16,window=4", "expected_attention:16,recent=2"])
def test_a_budget_begins_with_all_texts(gpt2, spec):
    model, parts, tail, wanted = gpt2
    cache = join(model, [alone(model, part) for part in parts], spec)
    torch.testing.assert_close(fed(model, cache, tail), wanted[None], **NEAR)
    assert cache.length == 16


def test_codes_are_not_encoded_again(gpt2):
    """Nothing is rotated, so a copy of all slots has the same codes."""
    model, parts = gpt2[:2]
    cache = join(model, [alone(model, part, "keep_all+int8") for part in parts])
    placed = kvkeep.Cache(model, "keep_all+int8")
    placed.restore(cache.snapshot())
    for one, two in zip(cache.layers, placed.layers, strict=True):
        assert one.held().keys.equal(two.held().keys)


def test_what_a_joined_cache_can_do(gpt2, tmp_path):
    model, parts, tail, wanted = gpt2
    caches = [alone(model, part) for part in parts]
    cache = join(model, caches)
    cache.save(tmp_path / "a.kv")
    loaded = kvkeep.load(tmp_path / "a.kv", model)
    fork = cache.freeze().fork(rows=2)
    again = join(model, [join(model, caches[:2]), *caches[2:]])
    with torch.inference_mode():
        pieces = [Piece(tail[0], join(model, caches)), Piece(parts[1][0], kvkeep.Cache(model))]
        packed = host_of(model).forward_packed(pieces)
    torch.testing.assert_close(packed[:1], wanted[None][:, -1], **NEAR)
    torch.testing.assert_close(
        fed(model, fork, tail.expand(2, -1)), wanted[None].expand(2, -1, -1), **NEAR
    )
    for one in (loaded, again, cache):
        torch.testing.assert_close(fed(model, one, tail), wanted[None], **NEAR)
    cache.crop(-AFTER - 3)
    short = join(model, [*caches[:3], alone(model, parts[3][:, :-3])])
    torch.testing.assert_close(fed(model, cache, tail), fed(model, short, tail), **NEAR)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "roberta", "whisper"])
def test_more_tokens_than_positions(kind):
    model = model_of(kind)
    most = 126 if kind == "roberta" else 128  # whose first position is 2
    *parts, over = texts(60, most - 63, 4)
    with kvkeep.attach(model):
        caches = [alone(model, part) for part in parts]
        assert fed(model, join(model, caches), over[:, :3]).isfinite().all()
        with pytest.raises(ShapeError, match=f"of {most + 1} tokens.* for {most} positions"):
            join(model, [*caches, alone(model, over)])


def test_positions_that_layers_use_unnoticed(monkeypatch):
    """Llama's code, as if it had no rotary embedding."""
    model = tiny("llama")
    monkeypatch.setattr("kvkeep.hf.host.rotaries_of", lambda _: [None] * 2)
    with pytest.raises(UnsupportedError, match="keys of layer 0 of llama depend on their position"):
        join(model, [kvkeep.Cache(model)])


def test_texts_at_given_positions_are_refused(gpt2):
    """`prefill` promises texts at the positions of the whole."""
    model, parts, _, _ = gpt2
    with pytest.raises(UnsupportedError, match=r"use kvkeep\.blocks\.join"):
        prefill(model, [part[0] for part in parts])
