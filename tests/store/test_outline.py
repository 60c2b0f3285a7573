"""Outlines: the shape of a store's tree, as one may see it who knows a single text."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny
from support.token_caches import TOKEN_BYTES, fed

import kvkeep
from kvkeep.errors import SpecError
from kvkeep.store import PrefixStore, tree


def stored(*texts):
    store = PrefixStore()
    for text in texts:
        store.insert("a", torch.tensor(text), fed(text))
    return store


def shape(store, tokens, most=99):
    nodes = store.outline_of("a", torch.tensor(tokens), most)
    return [(n.parent, n.tokens, n.nbytes // TOKEN_BYTES, n.shared, n.left_out) for n in nodes]


def test_a_text_is_marked_as_far_as_it_is_stored():
    store = stored([1, 2, 3, 4, 5], [1, 2, 3, 7], [8, 8])
    root, common = (-1, 0, 0, 0, 0), (0, 3, 3, 3, 0)
    assert shape(store, [1, 2, 3, 4, 9]) == [
        root,
        common,
        (0, 2, 2, 0, 0),
        (1, 2, 2, 1, 0),
        (1, 1, 1, 0, 0),
    ]
    assert shape(store, [1, 2])[1] == (0, 3, 3, 2, 0)
    assert {shared for *_, shared, _ in shape(store, [9])} == {0}
    assert store.outline_of("b", torch.tensor([1, 2]), 9) == []
    with store.match("a", torch.tensor([8, 8])):
        assert [node.locked for node in store.outline_of("a", torch.tensor([1]), 9)] == [
            *[False] * 2,
            True,
            *[False] * 2,
        ]


def test_an_outline_has_a_texts_own_nodes_and_those_used_last():
    store = stored([1, 1, 1], [1, 1, 2], *([i, 5] for i in range(2, 40)))
    with store.match("a", torch.tensor([7, 5])):
        pass
    found = shape(store, [1, 1, 1], most=4)
    assert found == [
        (-1, 0, 0, 0, 36),
        (0, 2, 2, 2, 1),
        (0, 2, 2, 0, 0),
        (0, 2, 2, 0, 0),
        (1, 1, 1, 1, 0),
    ]
    before = [node.used for node in store._entries.nodes()]
    store.outline_of("a", torch.tensor([7, 5]), 99)
    assert [node.used for node in store._entries.nodes()] == before
    assert shape(store, [1, 1, 1], most=1) == [(-1, 0, 0, 0, 38), (0, 2, 2, 2, 2)]


def test_an_outline_looks_at_the_last_of_many_siblings(monkeypatch):
    store = stored([1, 1], *([i] * i for i in range(2, 40)))
    with store.match("a", torch.tensor([3] * 3)), store.match("a", torch.tensor([38] * 38)):
        pass
    monkeypatch.setattr(tree, "_LOOKED_AT", 4)
    nodes = store.outline_of("a", torch.tensor([1, 1]), 3)
    assert [(n.shared, n.left_out) for n in nodes] == [(0, 36), (2, 0), (0, 0), (0, 0)]
    assert [n.tokens for n in nodes] == [0, 2, 38, 39]


def test_an_outline_is_of_what_a_model_and_namespace_find():
    model, tokens = tiny("llama"), torch.arange(20)
    store = PrefixStore()
    with kvkeep.attach(model):
        store.prefill(model, tokens, namespace="ada")
        found = store.outline(model, tokens, namespace="ada")
        assert [(node.tokens, node.shared) for node in found] == [(0, 0), (19, 19)]
        assert found[1].nbytes == store.nbytes
        assert not store.outline(model, tokens)
        assert not store.outline(model, tokens, namespace="ada", spec="keep_all+int8")
        with pytest.raises(SpecError, match="at least 1"):
            store.outline(model, tokens, most=0)
