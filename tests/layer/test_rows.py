"""Rows on evicting and quantised layers: each is as if it had run alone, and is encoded once."""

from __future__ import annotations

import pytest
import torch
from support.pairwise import pairwise
from support.two_layer_caches import OTHER_BITS

from kvkeep.errors import StateError
from kvkeep.planes import POSITION
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing
from kvkeep.testing import CODEC_EXAMPLES, EXAMPLES, conformance_specs, live_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM, GROUP = 2, 8, 3
NEAR = {"atol": 2e-5, "rtol": 0}
GROWING = [
    spec
    for spec in conformance_specs()
    if spec.storage.name == "growing" and spec.key_codec.name not in OTHER_BITS
]
CHUNKS = [[3, 5, 9, 7, 4], [1] * 24, [14, 1, 1, 6, 1, 1]]
EVICTING = [
    (CacheSpec.parse(f"{EXAMPLES[name]}+{parts}"), chunks)
    for name, parts, chunks in pairwise(
        [name for name in EXAMPLES if name != "keep_all"],
        ["plain@growing", "int8@concat", "plain@fixed"],
        CHUNKS,
    )
    if not (CacheSpec.parse(EXAMPLES[name]).policy.ragged and parts.endswith("@fixed"))
]
ONE_OF_EACH = [spec for spec, chunks in EVICTING if chunks is CHUNKS[0]]


def tokens(rows, n):
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [torch.randn(rows, h, n, DIM) for h in heads]


def live(layer):
    return [[sorted(place) for place, _, _ in row] for row in live_tokens(layer)]


def codes(layer):
    """Every plane of keys and values of each live token: (row, head, position) -> bits."""
    found = {}
    planes = {n: p.clone() for n, p in layer.storage.read().items()}
    position = planes.pop(POSITION)
    rows, heads = planes["k"].shape[:2]
    names = [n for n in planes if n.partition("_")[0] in ("k", "v")]
    for b in range(rows):
        for h in range(heads):
            for slot, p in enumerate(position[b, h % position.shape[1]].tolist()):
                if p >= 0:
                    found[b, h, p] = {n: planes[n][b, h, slot] for n in names}
    return found


@pytest.mark.parametrize("spec", [s for s in GROWING if s.key_codec.block == 1], ids=str)
def test_a_token_is_encoded_once(spec):
    layer = spec.layer()
    written = {}
    for step, n in enumerate([6, 1, 9, 1, 1, 3, 1, 14, 1, 2]):
        layer.step(*tokens(2, n), scale=0.4)
        now = codes(layer)
        for key, planes in now.items():
            before = written.setdefault(key, planes)
            assert all(plane.equal(before[name]) for name, plane in planes.items())
        if step == 4:
            layer.take_rows(torch.tensor([1, 0]))
            written = {(1 - b, h, p): planes for (b, h, p), planes in written.items()}
        if step in (0, 6) and layer.rollback_limit:
            layer.crop(-1)
            newest = layer.fed
            written = {key: planes for key, planes in written.items() if key[2] < newest}
    # The first tokens of a layer that evicts nothing are still what encoding them gave.
    assert layer.policy.budget is not None or len(now) == 2 * HEADS * layer.fed


def test_a_block_is_encoded_once():
    layer = CacheSpec.parse(f"keep_all+{CODEC_EXAMPLES['kivi']}").layer()
    before = None
    for _ in range(20):
        layer.step(*tokens(2, 1), scale=0.4)
        blocks = layer.slots.blocks
        if before is not None:
            count = before["k"].shape[2]
            assert all(blocks.storage.read()[n][:, :, :count].equal(p) for n, p in before.items())
        if blocks.storage.length:
            before = {n: p.clone() for n, p in blocks.storage.read().items()}
    assert blocks.length == 3  # of 4 tokens each, with at least 6 tokens kept plain


def test_blocks_without_memory_for_other_rows(monkeypatch):
    """The blocks have other rows and the tail has not: nothing is computed with that."""
    layer = CacheSpec.parse(f"keep_all+{CODEC_EXAMPLES['kivi']}").layer()
    layer.step(*tokens(2, 30), scale=0.4)
    rows, calls = Growing.rows, []

    def failing(storage, index):
        calls.append(storage)
        if len(calls) == 2:
            raise MemoryError("no memory")
        rows(storage, index)

    monkeypatch.setattr(Growing, "rows", failing)
    with pytest.raises(MemoryError):
        layer.take_rows(torch.tensor([1, 0]))
    monkeypatch.undo()
    with pytest.raises(StateError, match="failed"):
        layer.step(*tokens(2, 1), scale=0.4)


@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=str)
def test_reordered_rows_go_on_as_if_they_had_run_from_the_start(spec):
    """What beam search does."""
    together, schedule = spec.layer(), [7, 1, 1, 12, 1, 1]
    history = []  # of each present row: its tokens so far
    for step, n in enumerate(schedule):
        new = tokens(3, n)
        out = together.step(*new, scale=0.4)
        old = history or [[] for _ in range(3)]
        history = [[*old[b], [x[b : b + 1] for x in new]] for b in range(3)]
        alone = [spec.layer() for _ in range(3)]
        for b in range(3):
            for chunk in history[b]:
                expected = alone[b].step(*chunk, scale=0.4)
            torch.testing.assert_close(out[b : b + 1], expected, **NEAR)
            assert live(together)[b] == live(alone[b])[0]
        index = [[2, 0, 0], [0, 2, 1], [1, 1, 2]][step % 3]
        together.take_rows(torch.tensor(index))
        history = [history[i] for i in index]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", ["keydiff:8", "adakv(keydiff:8)"])
def test_equal_keys_go_the_oldest_first_wherever_padding_left_them(text, seed):
    torch.manual_seed(seed)
    together, alone = CacheSpec.parse(text).layer(), CacheSpec.parse(text).layer()
    for step, n in enumerate([6, 5, 1, 9, 1, 1, 14, 1, 9]):
        q, k, v = tokens(2, n)
        k = k.sign()  # a few different keys, of the same norm
        real = torch.ones(2, n, dtype=torch.bool)
        real[0, : [2, 0, 1, 4, 0, 0, 5, 0, 3][step]] = False
        together.step(q, k, v, together.next_positions(n, k.device, real), scale=0.4)
        own = real[0].nonzero().flatten()
        if len(own):
            alone.step(*(x[:1, :, own] for x in (q, k, v)), scale=0.4)
        assert live(together)[0] == live(alone)[0]


@pytest.mark.parametrize(("spec", "chunks"), EVICTING, ids=str)
def test_a_ragged_batch_equals_its_rows_alone(spec, chunks):
    together = spec.layer()
    alone = [spec.layer() for _ in range(3)]
    for index, n in enumerate(chunks):
        new = tokens(3, n)
        real = torch.ones(3, n, dtype=torch.bool)
        real[0, : [2, 0, 9, 0, 1, 0][index % 6]] = False  # padding on the left, or everywhere
        real[1, n - index % 3 :] = False  # on the right
        position = together.next_positions(n, torch.device("cpu"), real)
        out = together.step(*new, position, scale=0.4)
        for b, layer in enumerate(alone):
            own = real[b].nonzero().flatten()
            if len(own):
                expected = layer.step(*(x[b : b + 1, :, own] for x in new), scale=0.4)
                torch.testing.assert_close(out[b : b + 1, :, own], expected, **NEAR)
                found, wanted = live(together)[b], live(layer)[0]
                if layer.policy.reach is not None:  # which does not wait for padding
                    limit = int(layer.seen) - layer.policy.reach.size
                    sinks = layer.policy.reach.sinks
                    found, wanted = (
                        [[p for p in head if p > limit or p < sinks] for head in row]
                        for row in (found, wanted)
                    )
                assert found == wanted
    assert together.seen.tolist() == [int(layer.seen.sum()) for layer in alone]
