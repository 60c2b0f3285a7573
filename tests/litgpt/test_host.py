"""What stores, blocks, batches, compression and training do with a LitGPT model."""

from __future__ import annotations

import pytest
import torch
from support.tiny_litgpt import FAMILIES, tiny_gpt

import kvkeep
from kvkeep.blocks.prefill import prefill
from kvkeep.errors import SavedCacheError
from kvkeep.host import Piece, host_of
from kvkeep.store import PrefixStore


def ids(n=20, seed=3):
    return torch.randint(2, 96, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def gpt():
    gpt = tiny_gpt()
    with kvkeep.attach(gpt):
        yield gpt


@torch.no_grad()
def after(gpt, cache, tail):
    return host_of(gpt).forward(tail[None], cache, last=len(tail))[0]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek"])
def test_rotaries_turn_keys_as_the_model_does(family):
    """Keys moved by kvkeep are those that the model computes there."""
    gpt = tiny_gpt(family, rope_adjustments=None)
    host, text = host_of(gpt), ids(8)
    with kvkeep.attach(gpt), torch.no_grad():
        near, far = host.new_cache(), host.new_cache()
        host.feed(text[None, :1], near)
        host.feed(text[None, :1], far, position=torch.tensor([0]))
        rotaries = host.rotaries()
        for rotary, layer in zip(rotaries, near.layers, strict=True):
            keys = layer.held().keys
            again = rotary.turn(rotary.turn(keys, torch.tensor(7)), torch.tensor(-7))
            torch.testing.assert_close(again, keys, rtol=1e-4, atol=1e-5)
        moved = host.new_cache()
        host.feed(text[None, :1], moved, position=torch.tensor([7]))
        first = moved.layers[0].held().keys
        expected = rotaries[0].turn(near.layers[0].held().keys, torch.tensor(7))
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_stores_and_forks(gpt):
    store, text, tail = PrefixStore(), ids(30), ids(6, 4)
    cache = host_of(gpt).new_cache()
    expected = after(gpt, cache, torch.cat([text, tail]))[30:]
    first = store.read(gpt, text)
    again = store.read(gpt, torch.cat([text, tail[:1]]))
    assert (first.found, again.found) == (0, 30)
    torch.testing.assert_close(after(gpt, first.cache, tail), expected, rtol=1e-4, atol=1e-4)
    fork = again.cache.freeze().fork()
    torch.testing.assert_close(after(gpt, fork, tail[1:]), expected[1:], rtol=1e-4, atol=1e-4)


def test_the_attachment_goes_on_from_another_cache(gpt):
    text, tail = ids(30), ids(6, 4)
    expected = after(gpt, host_of(gpt).new_cache(), torch.cat([text, tail]))[30:]
    kvkeep.detach(gpt)
    with kvkeep.attach(gpt) as attachment, torch.no_grad():
        attachment.cache = PrefixStore().read(gpt, text).cache
        found = gpt(tail[None], torch.arange(30, 36))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    kvkeep.attach(gpt)


def test_joined_texts(gpt):
    texts = [ids(12, 1), ids(9, 2), ids(10, 5)]
    whole = host_of(gpt).new_cache()
    expected = after(gpt, whole, torch.cat([*texts, ids(5, 6)]))[-5:]
    found = prefill(gpt, texts, recompute="all")
    torch.testing.assert_close(after(gpt, found, ids(5, 6)), expected, rtol=1e-4, atol=1e-4)
    tail = ids(5, 6)
    apart = [after(gpt, prefill(gpt, texts, recompute=some), tail) for some in (0, 0.3, 0.9)]
    errors = [float((one - expected).norm()) for one in apart]
    assert errors[2] < errors[1] < errors[0]


def test_packed_forwards_are_those_of_each_alone(gpt):
    host, texts = host_of(gpt), [ids(9, 1), ids(5, 2), ids(1, 5)]
    expected = [after(gpt, host.new_cache(), text)[-1] for text in texts]
    with torch.no_grad():
        found = host.forward_packed([Piece(text, host.new_cache()) for text in texts])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_a_text_is_compressed(gpt):
    from kvkeep.host.compress import compress

    host, text = host_of(gpt), ids(60)
    cache = host.new_cache("kvzip:50%,recent=4")
    with torch.no_grad():
        host.feed(text[None], cache)
    before = cache.live_bytes
    compress(host, cache, text)
    assert cache.live_bytes < 0.6 * before
    assert after(gpt, cache, ids(4)).isfinite().all()


def test_a_saved_cache(gpt, tmp_path):
    text, tail, fed = ids(30), ids(6, 4), []
    kvkeep.detach(gpt)
    with kvkeep.attach(gpt, "h2o:16+int8") as attachment, torch.no_grad():
        gpt(text[None], torch.arange(30))
        attachment.save(tmp_path / "a.kv", tokens=text[None])
        expected = gpt(tail[None], torch.arange(30, 36))
        attachment.cache = kvkeep.load(tmp_path / "a.kv", gpt, tokens=lambda x: fed.append(x))
        assert gpt(tail[None], torch.arange(30, 36)).equal(expected)
    assert fed[0].equal(text[None])
    kvkeep.attach(gpt)
    with pytest.raises(SavedCacheError, match="weights differ"):
        kvkeep.load(tmp_path / "a.kv", tiny_gpt(seed=1))
