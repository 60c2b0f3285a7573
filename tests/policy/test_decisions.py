"""Every policy's evictions are those of an oracle that knows the whole attention matrix."""

from __future__ import annotations

import pytest
import torch
from support.eviction_oracle import SPECS, EvictionOracle
from support.pairwise import pairwise

import kvkeep.layer.step
from kvkeep.attention import backends, dispatch
from kvkeep.planes import POSITION
from kvkeep.policy import POLICIES
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, DIM, SCALE = 32, 2, 8, 0.4
SEPARATED = 1e-4
"""Scores that decide differ by more than float32 can err, and than what counts as equal."""

SCHEDULES = {
    "single tokens": [1] * TOKENS,
    "prompt": [16] + [1] * 16,
    "sevens": [7] * 4 + [4],
    "larger than the budget": [16, 3, 9, 1, 3],
}
PADDING: dict[str, tuple[int, list[tuple[int, int, int]]]] = {
    "none": (3, []),
    "left": (3, [(0, 0, 5)]),
    "middle": (1, [(0, 9, 12), (1, 18, 24)]),
    "whole chunks": (3, [(0, 14, 22)]),
}
WHERE = [
    ("native", "growing"),
    ("native", "fixed"),
    ("reference", "concat"),
    ("sdpa", "fixed"),
]
"""sdpa reports no mass, so it only serves policies that need none."""


def tensors(seed: int, group: int) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    heads = (HEADS * group, HEADS, HEADS)
    return tuple(torch.randn(2, h, TOKENS, DIM, generator=make) for h in heads)


def chunks(schedule: str) -> list[slice]:
    ends = torch.tensor(SCHEDULES[schedule]).cumsum(0).tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def expected(spec, window, slopes, data, real, schedule):
    """The oracle's live positions after every step, and how close its closest decision was."""
    oracle = EvictionOracle(spec, scale=SCALE, window=window, slopes=slopes)
    kept = []
    for part in chunks(schedule):
        kept.append(oracle.step(*(x[:, :, part] for x in data), real[:, part]))
    return kept, oracle.gap


def live(layer):
    """Positions by row and head."""
    position = layer.storage.read()[POSITION].expand(-1, HEADS, -1)
    return [[sorted(p for p in head if p >= 0) for head in row] for row in position.tolist()]


def reachable(kept, reach, seen):
    """Those that a later query can see: a reach does not wait for padding to drop the others."""
    if reach is None:
        return kept
    return [
        [[p for p in head if reach.allows(now, p)] for head in row]
        for row, now in zip(kept, seen.tolist(), strict=True)
    ]


@pytest.fixture
def through(monkeypatch):
    """Choose the backend of all steps; where it refuses a call, the one that attend takes."""

    def choose(name: str) -> list[str]:
        used = []
        backend = next(b for b in backends() if b.name == name)

        def forced(q, view, options):
            refused = not backend.available or backend.refuses(q, view, options)
            used.append("" if refused else name)
            return dispatch(q, view, options, None if refused else name)

        monkeypatch.setattr(kvkeep.layer.step, "dispatch", forced)
        return used

    return choose


def test_every_policy_that_evicts_is_here():
    named = {spec.partition(":")[0].partition("(")[0] for spec, _ in SPECS}
    # pyramid is h2o with another budget, expected_attention and kvzap have oracles of their own,
    # and kvzip evicts in `compress` only.
    others = {"keep_all", "pyramid", "expected_attention", "kvzip", "kvzap"}
    assert named == set(POLICIES) - others


@pytest.mark.parametrize(
    ("spec", "window", "padding", "schedule", "biased"),
    [
        (*which, *how)
        for which, *how in pairwise(SPECS, list(PADDING), list(SCHEDULES), [False, True])
    ],
)
def test_decisions(spec, window, padding, schedule, biased, through):
    group, holes = PADDING[padding]
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    for row, start, stop in holes:
        real[row, start:stop] = False
    slopes = (0.3, -0.1, 0.02, 0.0, 1.0, 0.1)[: HEADS * group] if biased else None
    for seed in range(50):
        data = tensors(seed, group)
        kept, gap = expected(spec, window, slopes, data, real, schedule)
        if gap > SEPARATED:
            break
    else:
        pytest.fail("no data whose scores are far enough apart")
    for backend, storage in WHERE:
        if storage == "fixed" and spec.startswith("adakv"):
            continue
        used = through(backend)
        layer = CacheSpec.parse(f"{spec}@{storage}").layer(window=window, slopes=slopes)
        if backend == "sdpa" and layer.policy.needs:
            continue
        for index, part in enumerate(chunks(schedule)):
            position = layer.next_positions(part.stop - part.start, data[0].device, real[:, part])
            given = position if holes else None
            layer.step(*(x[:, :, part] for x in data), given, scale=SCALE)
            reach, seen = layer.policy.reach, layer.seen
            found, wanted = (reachable(x, reach, seen) for x in (live(layer), kept[index]))
            same = found == wanted  # pytest would take seconds to explain the difference
            assert same, f"step {index}, {backend}, {storage}: {found}, not {wanted}"
        assert backend != "reference" or all(used)
