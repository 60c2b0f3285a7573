"""A layer whose decode steps are native calls, and one whose steps are made by parts, do the same
whatever happens between the steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvkeep import native_library
from kvkeep.errors import KVKeepError
from kvkeep.layer.decode.plan import StepPlan
from kvkeep.layer.layer import LayerCache
from kvkeep.spec import CacheSpec
from kvkeep.storage.buffer import Buffer

pytestmark = [
    pytest.mark.skipif(not native_library.available, reason=native_library.reason),
    pytest.mark.filterwarnings("ignore::kvkeep.errors.PrecisionWarning"),
]

SPECS = [
    "keep_all",
    "keep_all+int8",
    "keep_all+kivi",
    "window:7,sinks=2",
    "h2o:8",
    "h2o:8,normalize=1+int8@fixed:40",
    "h2o:30%,least=6",
    "qvlen:8+int4/int8",
    "tova:8",
    "snapkv:12,window=4",
    "knorm:8",
    "keydiff:8,recent=2",
    "keydiff:8,recent=2+int8",
    "expected_attention:9,sinks=1",
    "random:8",
    "adakv(h2o:8)",
    "adakv:0.5(h2o:25%,least=6)",
    "kvzip:50%",
    "keep_all+int4:recent=4,sinks=1",
    "kvzip:50%+int4:recent=4,sinks=1",
    "window:11,sinks=2+int4:recent=4,sinks=1",
    "h2o:12+int4:recent=4,sinks=1",
    "adakv(h2o:12)+int4:recent=4,sinks=1",
    "adakv(keydiff:12)+int4:recent=4,sinks=1",
]
OPTIONS: list[dict[str, Any]] = [{}, {}, {"window": 9}, {"window": 12, "chunked": True}]
DIM, HEADS, GROUP = 16, 2, 2


class Layers(RuleBasedStateMachine):
    """Two layers in the same state, of which one makes its steps by parts."""

    spec: str

    @initialize(own=st.sampled_from(OPTIONS), rows=st.sampled_from([1, 1, 2]))
    def begin(self, own: dict[str, Any], rows: int) -> None:
        spec = self.spec
        if "kivi" in spec:
            own = {}
        self.layers = [CacheSpec.parse(spec).layer(**own) for _ in range(2)]
        self.layers[1].plans = False
        self.random = torch.Generator().manual_seed(len(spec) + rows)
        self.rows, self.saved = rows, None
        self.step(3, [])

    def each(self, change: Any) -> None:
        """Change both layers, or neither."""
        errors = []
        for index, layer in enumerate(self.layers):
            try:
                self.layers[index] = change(layer) or layer
                errors.append("")
            except KVKeepError as error:
                errors.append(f"{type(error).__name__}: {error}")
        assert errors[0] == errors[1]
        self.layers[1].plans = False

    def step(self, n: int, pads: list[int]) -> None:
        make = {"generator": self.random}
        sizes = (HEADS * GROUP, HEADS, HEADS)
        q, k, v = (torch.randn(self.rows, n, h, DIM, **make).transpose(1, 2) for h in sizes)
        position = None
        if pads:
            real = torch.arange(n) >= torch.tensor(pads)[:, None]
            position = self.layers[0].next_positions(n, real.device, real)
        outs: list[torch.Tensor] = []
        self.each(lambda layer: outs.append(layer.step(q, k, v, position, scale=0.3)))
        if len(outs) == 2:
            torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)

    @rule(count=st.integers(1, 6))
    def tokens(self, count: int) -> None:
        for _ in range(count):
            self.step(1, [])

    @rule(n=st.integers(2, 9))
    def chunk(self, n: int) -> None:
        self.step(n, [])

    @precondition(lambda self: self.rows == 2)
    @rule(n=st.integers(1, 9), pad=st.integers(1, 9), row=st.booleans())
    def padded(self, n: int, pad: int, row: bool) -> None:
        self.step(n, [min(pad, n) * row, min(pad, n) * (not row)])

    @rule(tokens=st.integers(1, 4))
    def crop(self, tokens: int) -> None:
        self.each(lambda layer: layer.crop(-tokens))

    @rule(drafts=st.integers(1, 4), rejected=st.integers(0, 4))
    def draft(self, drafts: int, rejected: int) -> None:
        for layer in self.layers:
            layer.record_past = True
        self.step(1, [])
        self.step(drafts, [])
        self.each(lambda layer: layer.crop(-min(rejected, drafts)))
        for layer in self.layers:
            layer.record_past = False
        self.each(lambda layer: layer.settle())

    @rule()
    def freeze(self) -> None:
        self.each(LayerCache.freeze)

    @rule(how=st.sampled_from(["fork", "deepcopy", "pickle"]))
    def copied(self, how: str) -> None:
        ways = {"fork": LayerCache.fork, "deepcopy": copy.deepcopy}
        self.each(ways.get(how, lambda layer: pickle.loads(pickle.dumps(layer))))

    @rule()
    def save(self) -> None:
        self.saved = [layer.state().copy() for layer in self.layers], self.rows

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        states, self.rows = self.saved
        for layer, state in zip(self.layers, states, strict=True):
            layer.restore(state)

    @precondition(lambda self: self.rows == 2)
    @rule(index=st.sampled_from([[1, 0], [0, 0]]))
    def take_rows(self, index: list[int]) -> None:
        self.each(lambda layer: layer.take_rows(torch.tensor(index)))

    @rule(threads=st.integers(1, 2))
    def threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @rule(where=st.sampled_from([(StepPlan, "count"), (StepPlan, "sequences")]))
    def interrupted(self, where: tuple[type, str]) -> None:
        """The step is undone; or it is refused for good, and the layers are restored."""
        layer, (owner, name) = self.layers[0], where
        before = layer.state().copy()
        sizes = (HEADS * GROUP, HEADS, HEADS)
        q, k, v = (torch.randn(self.rows, h, 1, DIM, generator=self.random) for h in sizes)
        with pytest.MonkeyPatch.context() as patch:

            def stop(*given: object, **named: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(owner, name, stop)
            patch.setattr(Buffer, "append_in_place", stop)
            try:
                layer.step(q, k, v, scale=0.3)
                made = True  # by parts, and it was not stopped
            except KeyboardInterrupt:
                made = False
        if made:
            self.layers[1].step(q, k, v, scale=0.3)
            return
        try:
            layer.cursor.mend()
        except KVKeepError:
            pass
        else:  # slots that no later query can reach may be gone
            assert layer.fed == self.layers[1].fed
            assert layer.length <= self.layers[1].length
        for one in self.layers:
            one.restore(before)

    @rule()
    def reset(self) -> None:
        self.each(LayerCache.reset)
        self.saved = None
        self.step(4, [])

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "layers"):
            return
        one, other = self.layers
        assert (one.fed, one.length, one.rollback_limit) == (
            other.fed,
            other.length,
            other.rollback_limit,
        )
        assert torch.equal(one.seen, other.seen)
        assert torch.equal(one.positions().sort().values, other.positions().sort().values)


@pytest.mark.parametrize("examples", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", SPECS)
def test_agrees(spec: str, examples: int, one_thread: None) -> None:
    machine = type("Own", (Layers,), {"spec": spec})
    options = settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
