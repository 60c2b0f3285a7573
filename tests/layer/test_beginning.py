"""A layer that begins with the tokens of another one, which keeps all."""

from __future__ import annotations

import pytest
import torch
from support.bits import alike
from support.pairwise import covering
from support.two_layer_caches import OTHER_BITS

from kvkeep.errors import ShapeError
from kvkeep.layer.beginning import begin_with
from kvkeep.policy import POLICIES
from kvkeep.spec import CacheSpec
from kvkeep.testing import conformance_specs

HEADS, GROUP, DIM = 2, 2, 8
HELD, NEW = 30, 9

SPECS = covering(
    [
        spec
        for spec in conformance_specs()
        if spec.policy.name != "kvzip" and spec.key_codec.name not in OTHER_BITS
    ],
    lambda spec: (spec.policy.name, spec.key_codec.name, spec.storage.name),
)
"""Every two of a policy, a codec and a storage that go together; kvzip begins with what it keeps of
a text."""


def tokens(n, rows=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [torch.randn(rows, h, n, DIM, generator=draw) for h in heads]


def text_of(k, v):
    layer = CacheSpec.parse("keep_all").layer()
    layer.extend(k, v)
    layer.settle()
    return layer


def held(layer):
    return layer.history.columns, {
        (part, name): planes[name]
        for part, planes in layer.state().parts.items()
        for name in planes
    }


def same(one, two):
    (columns, planes), (others, found) = held(one), held(two)
    return (
        columns == others
        and planes.keys() == found.keys()
        and all(alike(plane, found[at]) for at, plane in planes.items())
    )


def test_every_policy_is_here():
    assert {spec.policy.name for spec in SPECS} == set(POLICIES) - {"kvzip", "kvzap"}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_goes_on_as_after_one_chunk(spec):
    """As if the held tokens and the next chunk had been one, whose last queries were observed."""
    _, k, v = tokens(HELD)
    written, begun = spec.layer(capacity=HELD), spec.layer(capacity=HELD)
    written.extend(k, v)
    text = text_of(k, v)
    begin_with(begun, text)
    assert begun.fed == begun.length == HELD
    for step, n in enumerate((NEW, 1, 1, 3)):
        chunk = tokens(n, seed=step + 1)
        assert alike(begun.step(*chunk, scale=0.4), written.step(*chunk, scale=0.4))
        assert same(begun, written)
    assert text.length == HELD  # other caches may share it
    assert held(text)[1]["slots", "k"].equal(k)


@pytest.mark.parametrize("spec", ["window:6", "knorm:8", "keydiff:8,recent=2", "adakv(knorm:8)"])
def test_it_settles_without_a_step(spec):
    _, k, v = tokens(HELD)
    written, begun = (CacheSpec.parse(spec).layer() for _ in range(2))
    written.extend(k, v)
    begin_with(begun, text_of(k, v))
    for layer in (written, begun):
        layer.settle()
    assert same(begun, written)
    assert begun.length < HELD


def test_slots_are_shared_until_some_are_evicted(monkeypatch):
    """Then only those that stay are copied."""
    _, k, v = tokens(HELD)
    text, layer = text_of(k, v), CacheSpec.parse("h2o:8").layer()
    begin_with(layer, text)
    shared = layer.slots.frozen.runs[0].planes["k"]
    assert shared.data_ptr() == text.slots.frozen.runs[0].planes["k"].data_ptr()
    assert layer.slots.stats.shared_bytes == 2 * k.nbytes + 4 * HEADS * HELD
    largest = []
    gather = torch.Tensor.gather
    monkeypatch.setattr(
        torch.Tensor, "gather", lambda *x: largest.append((x[0], gather(*x))) or largest[-1][1]
    )
    layer.step(*tokens(NEW, seed=1), scale=0.4)
    copied = [found for plane, found in largest if plane.dim() == 4]
    assert copied
    assert max(found.shape[2] for found in copied) == 8
    assert layer.slots.stats.shared_bytes == 0


def test_rows_share_what_they_begin_with():
    _, k, v = tokens(HELD)
    alone, rows = (CacheSpec.parse("snapkv:8,window=4").layer() for _ in range(2))
    for layer in (alone, rows):
        begin_with(layer, text_of(k, v))
    rows.take_rows(torch.zeros(3, dtype=torch.int64))
    assert rows.slots.frozen.runs[0].planes.batch == 1
    chunk = tokens(NEW, rows=3, seed=1)
    out = rows.step(*chunk, scale=0.4)
    torch.testing.assert_close(out[1:2], alone.step(*(x[1:2] for x in chunk), scale=0.4))
    assert rows.positions()[1].sort().values.equal(alone.positions()[0].sort().values)
    assert not rows.positions()[0].sort().values.equal(rows.positions()[1].sort().values)


def test_bad_victims_of_shared_slots():
    """A policy of a user's own may name slots that are not there."""
    _, k, v = tokens(HELD)
    layer = CacheSpec.parse("h2o:8").layer()
    begin_with(layer, text_of(k, v))
    for victims in ([3, 3], [-1, 2], [1, HELD]):
        with pytest.raises(ShapeError, match="2 different slots, 0 to 29"):
            layer.slots.evict(torch.tensor(victims).expand(1, HEADS, 2))
    assert layer.length == HELD
