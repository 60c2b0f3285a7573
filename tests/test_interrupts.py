"""An interrupted step is taken back, or the cache is refused: it never gives other results."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.interruption import Interruption
from support.slow import every

from kvkeep.cache import Cache
from kvkeep.errors import RollbackError, StateError
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = [
    "keep_all",
    "keep_all+int8@fixed:40",
    "keep_all@concat",
    "keep_all@host",
    "keep_all+kivi:4,together=4,recent=0",
    "window:8",
    "window:8@fixed",
    "h2o:8",
    "tova:8@fixed",
    "adakv(h2o:8)",
    "h2o:8,step=5",
    "knorm:40,step=5",  # nothing is evicted, so it is taken back
]
SCHEDULES = {"token": [12, 1], "growth": [12, 13], "chunk": [12, 6], "first": [12]}


def inputs(schedule):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(2, h, n, 8, generator=generator) for h in (4, 2, 2)]
        for n in [*SCHEDULES[schedule], 1, 1]
    ]


def forward(cache, chunk):
    cache.admit(chunk[0].shape[2])
    return torch.stack([layer.step(*chunk, scale=0.4) for layer in cache.layers])


def run(spec, chunks, at):
    """Feed the chunks, of which the last but two is interrupted at a line and fed again: whether it
    was interrupted, and what the last two give."""
    cache = Cache([CacheSpec.parse(spec).layer() for _ in range(2)])
    *before, interrupted, one, two = chunks
    for chunk in before:
        forward(cache, chunk)
    columns = cache.fed
    with Interruption(at) as interruption:
        forward(cache, interrupted)
    if interruption.met:
        try:
            cache.rewind(columns)
        except (RollbackError, StateError):  # said, and nothing but a reset helps
            cache.reset()
            for chunk in before:
                forward(cache, chunk)
        forward(cache, interrupted)
    cache.snapshot()
    return interruption.met, [forward(cache, one), forward(cache, two)]


def interrupt_each(spec, schedule, every):
    chunks = inputs(schedule)
    _, wanted = run(spec, chunks, 10**9)
    met, at = True, every // 2
    while met:
        met, found = run(spec, chunks, at)
        assert all(x.equal(y) for x, y in zip(found, wanted, strict=True)), at
        at += every
    assert at > 100


@pytest.mark.parametrize(("schedule", "spec"), every(2, product(SCHEDULES, SPECS)))
def test_an_interrupt_at_some_lines(spec, schedule):
    interrupt_each(spec, schedule, 197)


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", ["keep_all", "window:8", "h2o:8", "tova:8@fixed"])
def test_an_interrupt_while_freezing(spec, every):
    """Slots that moved to the frozen ones are not counted twice: the cache goes on, or refuses."""
    *before, one, _ = inputs("token")
    wanted = run(spec, [*before, one], 10**9)[1][1]
    met, at = True, 0
    while met:
        cache = Cache([CacheSpec.parse(spec).layer() for _ in range(2)])
        for chunk in before:
            forward(cache, chunk)
        with Interruption(at) as interruption:
            cache.freeze()
        met, at = interruption.met, at + every
        try:
            assert forward(cache, one).equal(wanted)
        except StateError:
            assert met
    assert at > 10


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spec", SPECS)
def test_an_interrupt_at_any_line(spec, schedule):
    interrupt_each(spec, schedule, 1)
