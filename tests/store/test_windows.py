"""Models with sliding windows: a text serves later prompts after tokens have left the windows."""

from __future__ import annotations

import pytest
import torch
from support.random_ids import row
from support.tiny_models import tiny

import kvkeep
from kvkeep import PrefixStore
from kvkeep.planes import POSITION
from kvkeep.store.beginning import observed_again

WINDOW = 8
"""Of the tiny models."""

MODELS = ["mistral", "gemma3", "gpt-oss", "llama4"]
"""All layers with a window, some, with attention sinks, and in chunks."""


@torch.no_grad()
def logits(model, tokens, cache):
    return model(tokens[None], past_key_values=cache).logits[0]


@pytest.fixture(params=MODELS)
def model(request):
    found = tiny(request.param)
    with kvkeep.attach(found):
        yield found


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "snapkv:12,window=4"])
def test_a_hit_after_ten_windows(model, spec):
    text, more = row(10 * WINDOW + 3), row(30, 5)
    store = PrefixStore()
    read = store.read(model, text, spec=spec).cache
    hit = store.read(model, text, spec=spec)
    assert hit.found == len(text) - observed_again(read)
    for part in more.split([1, 20, 9]):
        expected = logits(model, part, read)
        torch.testing.assert_close(logits(model, part, hit.cache), expected, atol=1e-5, rtol=1e-4)
    store.check()


def test_only_the_window_is_stored(model):
    store = PrefixStore()
    store.read(model, row(10 * WINDOW))
    (node,) = store._entries.nodes()
    kinds = kvkeep.Cache(model).layers
    for layer, planes in zip(kinds, node.content.layers, strict=True):
        held = planes[POSITION].flatten().tolist()
        assert held == list(range(10 * WINDOW))[-(layer.window or 0) :]


def test_texts_that_differ_after_a_common_beginning(model):
    """The second text stores the windows where it leaves the first, and the third begins there."""
    store, common = PrefixStore(), row(5 * WINDOW + 3)
    texts = [torch.cat([common, row(3 * WINDOW, seed)]) for seed in (1, 2, 3)]
    found = [store.read(model, text).found for text in texts]
    assert found[0] == 0
    assert found[2] == len(common)
    again = [store.read(model, text) for text in texts]
    assert [one.found for one in again] == list(map(len, texts))
    for text, one in zip(texts, again, strict=True):
        alone, part = kvkeep.Cache(model), row(4, 9)
        logits(model, text, alone)
        expected = logits(model, part, alone)
        torch.testing.assert_close(logits(model, part, one.cache), expected, atol=1e-5, rtol=1e-4)
    store.check()


def test_a_beginning_of_a_stored_text(model):
    """Its windows are added to the slots that the longer text has stored."""
    store, text = PrefixStore(), row(10 * WINDOW)
    store.read(model, text)
    before = store.nbytes
    store.read(model, text[: 5 * WINDOW + 3])
    assert store.nbytes > before
    assert store.read(model, text[: 5 * WINDOW + 3]).found == 5 * WINDOW + 3
    assert store.read(model, text).found == len(text)
    store.check()


def test_a_budget(model):
    """Windows are counted by the slots that they hold."""
    store, text = PrefixStore(), row(10 * WINDOW)
    store.read(model, text)
    exact, tight = PrefixStore(store.nbytes), PrefixStore(store.nbytes - 1)
    for one in (exact, tight):
        one.read(model, text)
        one.check()
    assert exact.read(model, text).found == len(text)
    assert tight.read(model, text).found < len(text)
