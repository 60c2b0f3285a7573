"""Random sequences of extend, crop, reorder, repeat, select and reset, against the oracle."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep.cache import Cache
from kvkeep.errors import RollbackError
from kvkeep.spec import CacheSpec
from kvkeep.testing import OracleLayer, check_layer

HEADS, GROUP, DIM = 2, 2, 4
SPECS = (
    "keep_all@growing",
    "keep_all@growing:1.1",
    "keep_all@fixed:512",
    "keep_all@concat",
    "window:5@growing",
    "window:5@fixed",
    "window:3,sinks=2@fixed:9",
    "window:4,sinks=1@concat",
)


class CacheMachine(RuleBasedStateMachine):
    """Drives a one-layer cache and the oracle through the same history."""

    @initialize(spec=st.sampled_from(SPECS), rows=st.integers(1, 3), own=st.sampled_from([None, 4]))
    def start(self, spec, rows, own):
        self.spec = CacheSpec.parse(spec)
        self.cache = Cache([self.spec.layer(window=own)])
        (self.layer,) = self.cache.layers
        self.oracle = OracleLayer(reach=self.spec.policy.reach, window=own)
        self.rows, self.total = rows, 0

    @rule(n=st.integers(1, 9), seed=st.integers(0, 2**16), padded=st.booleans())
    @precondition(lambda self: self.total < 400)
    def extend(self, n, seed, padded):
        generator = torch.Generator().manual_seed(seed)
        rows = self.rows
        q, k, v = (
            torch.randn(rows, heads, n, DIM, generator=generator, dtype=torch.float64)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        real = torch.rand(rows, n, generator=generator) > (0.4 if padded else -1)
        position = self.oracle.next_positions(real)
        out = self.layer.step(q, k, v, position if padded else None, scale=0.5)
        expected = self.oracle.step(q, k, v, position, scale=0.5)
        padding = (position < 0)[:, None, :, None]
        torch.testing.assert_close(
            out.masked_fill(padding, 0), expected.masked_fill(padding, 0), atol=1e-9, rtol=1e-9
        )
        self.total += n

    @rule(data=st.data())
    def crop(self, data):
        tokens = data.draw(st.integers(0, self.cache.rollback_limit))
        self.cache.crop(-tokens)
        self.oracle.crop(-tokens)
        self.total -= tokens

    @rule(more=st.integers(1, 5))
    @precondition(lambda self: self.total)
    def crop_too_much(self, more):
        before = self.cache.stats()
        with pytest.raises(RollbackError):
            self.cache.crop(-self.cache.rollback_limit - more)
        assert self.cache.stats() == before

    @rule(on=st.booleans())
    def record_past(self, on):
        self.layer.record_past = on
        if not on:
            self.layer.settle()

    @rule(data=st.data())
    @precondition(lambda self: self.total)
    def reorder(self, data):
        index = data.draw(
            st.lists(st.integers(0, self.rows - 1), min_size=self.rows, max_size=self.rows)
        )
        self.cache.reorder(index)
        self.oracle.take_rows(index)

    @rule(data=st.data())
    @precondition(lambda self: self.total)
    def select(self, data):
        index = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=3))
        self.cache.select(index)
        self.oracle.take_rows(index)
        self.rows = len(index)

    @rule()
    @precondition(lambda self: self.total and self.rows == 1)
    def repeat(self):
        self.cache.repeat(2)
        self.oracle.take_rows([0, 0])
        self.rows = 2

    @rule()
    def reset(self):
        self.cache.reset()
        self.oracle.reset()
        self.total = 0

    @invariant()
    def holds_what_it_was_fed(self):
        if getattr(self, "total", 0) and not self.layer.record_past:
            check_layer(self.layer, self.oracle)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestCache = CacheMachine.TestCase
