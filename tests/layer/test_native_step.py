"""Steps in one native call against steps by parts."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from kvkeep import native_library
from kvkeep.codec import Plain
from kvkeep.errors import StateError
from kvkeep.layer.decode.plan import FAILED, StepPlan
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION
from kvkeep.policy import H2O, KeepAll
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing
from kvkeep.storage.buffer import Buffer

pytestmark = pytest.mark.skipif(not native_library.available, reason=native_library.reason)

SPECS = [
    "keep_all",
    "keep_all@fixed:64",
    "keep_all+int8",
    "keep_all+int4/int8",
    "window:6",
    "window:5,sinks=2@fixed",
    "window:5,sinks=2+int8@fixed",
    "window:5,keep_from=3,keep_to=5",
    "h2o:8",
    "h2o:12,sinks=2,normalize=1+int8",
    "qh2o:8+int4/int8",
    "vlen:8@fixed:9",
    "qvlen:8,recent=2+int8",
    "tova:8",
    "snapkv:12,window=4",
    "knorm:8",
    "random:8",
    "keydiff:8,recent=2",
    "keydiff:8,recent=2+int8",
    "keydiff:8,recent=2+int4:centre=0/int8",
    "adakv(keydiff:8)",
    "expected_attention:12,sinks=2",
    "adakv(expected_attention:12,sinks=2)",
    "expected_attention:30%,least=6",
    "h2o:25%,least=6",
    "window:25%,least=6",
    "adakv(h2o:8)",
    "adakv:1.0(knorm:8,recent=3)",
    "adakv:0.5(h2o:25%,least=6)",
    "keep_all+kivi",
    "kvzip:50%",
    "kvzip:50%+int4:recent=6,sinks=2",
    "window:20,sinks=3+int4:recent=6,sinks=2",
    "h2o:20+int4:recent=6,sinks=2",
    "adakv(h2o:20)+int4:recent=6,sinks=2",
    "keydiff:20+int4:recent=6,sinks=2",
    "adakv(keydiff:20)+int4:recent=6,sinks=2",
    "adakv:0.7(qvlen:25%,least=12)+int4:recent=3,sinks=1",
]

SLOPES = (0.5, 0.1, -0.2, 0.0, 0.03, 1.0)

SCORES = ("score", "error", "value_norm")
"""Planes that the library may round otherwise."""


class Pair:
    """A layer and one that makes every step by parts, which are fed the same."""

    def __init__(
        self, spec: str, rows: int = 1, dtype: torch.dtype = torch.float32, **own: object
    ) -> None:
        self.rows, self.dtype = rows, dtype
        self.layers = [CacheSpec.parse(spec).layer(capacity=64, **own) for _ in range(2)]
        self.layers[1].plans = False
        self.random = torch.Generator().manual_seed(0)
        self.mean = torch.zeros(2, 32)  # of keys

    def each(self, change) -> None:
        for layer in self.layers:
            change(layer)

    def feed(self, n: int = 1, position: torch.Tensor | None = None) -> None:
        """Feed n tokens to both, as models lay them out, and compare everything."""
        q, k, v = (
            torch.randn(self.rows, n, heads, 32, generator=self.random)
            .to(self.dtype)
            .transpose(1, 2)
            for heads in (6, 2, 2)
        )
        k = (k.transpose(1, 2) + self.mean).to(self.dtype).transpose(1, 2)
        outs = [layer.step(q, k, v, position, scale=0.2) for layer in self.layers]
        # Parts of a layer are one call together, whose sums may be rounded otherwise.
        torch.testing.assert_close(
            *outs, rtol=1e-5 if self.layers[0].policy.ragged else 0, atol=1e-6
        )
        one, other = self.layers
        assert torch.equal(one.positions(), other.positions())
        assert one.length == other.length
        assert one.rollback_limit == other.rollback_limit
        assert torch.equal(one.seen, other.seen)
        found, expected = (layer.state().parts for layer in self.layers)
        for part, planes in expected.items():
            for name in planes:
                a, b = found[part][name], planes[name]
                if name in SCORES:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
                else:
                    assert torch.equal(a, b), name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns that were fed in one call."""
    found: list[int] = []
    count = StepPlan.count

    def counted(self: StepPlan, *given: object) -> None:
        found.append(self.column)
        count(self, *given)

    monkeypatch.setattr(StepPlan, "count", counted)
    return found


@pytest.mark.filterwarnings("ignore::kvkeep.errors.PrecisionWarning")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("rows", "dtype", "slopes"), [(1, torch.bfloat16, SLOPES), (3, torch.float32, None)]
)
def test_equals_a_step_by_parts(
    spec: str,
    rows: int,
    dtype: torch.dtype,
    slopes: tuple[float, ...] | None,
    calls: list[int],
) -> None:
    pair = Pair(spec, rows, dtype, slopes=slopes)
    pair.feed(3)
    for column in range(3, 30):
        pair.feed(position=torch.tensor([column], dtype=torch.int32) if column % 2 else None)
    # The first prepares the others. Heads of different lengths are parts of one row.
    alone = rows > 1 and pair.layers[0].policy.ragged
    assert len(calls) > 10 or "keep_from" in spec or (alone and not calls)


@pytest.mark.parametrize("pads", [(0, 2), (0, 12)])
@pytest.mark.parametrize("spec", ["keep_all", "window:6,sinks=2", "h2o:8", "tova:9", "knorm:8"])
def test_rows_that_had_padding(spec: str, pads: tuple[int, ...], calls: list[int]) -> None:
    """Rows of different lengths stay together, or are parted."""
    pair = Pair(spec, rows=2, slopes=SLOPES if pads == (0, 12) else None)
    real = torch.arange(14) >= torch.tensor(pads)[:, None]
    pair.feed(14, pair.layers[0].next_positions(14, real.device, real))
    for _ in range(20):
        pair.feed()
    pair.feed(position=pair.layers[0].next_positions(1, real.device, real[:, :1]))
    for _ in range(4):
        pair.feed()
    assert len(calls) > 12


@pytest.mark.parametrize(
    "options", [{"window": 12}, {"window": 30}, {"window": 6, "chunked": True}]
)
@pytest.mark.parametrize("spec", ["h2o:8", "adakv(h2o:8)", "window:9", "snapkv:10,window=3"])
def test_a_layer_with_a_window_of_its_own(spec, options, calls) -> None:
    pair = Pair(spec, **options)
    for n in (5, *[1] * 40):
        pair.feed(n)
    assert len(calls) > 20


def test_a_policy_that_overrides_its_rule_is_asked() -> None:
    """Methods of a class that inherits a rule are called, not the rule."""

    class Oldest(H2O):
        def score(self, planes, seen):
            return planes[POSITION].float()

    layer = CacheSpec(Oldest(4, recent=0)).layer()
    for n in (3, *[1] * 9):
        layer.step(*(torch.randn(1, heads, n, 32) for heads in (6, 2, 2)), scale=0.2)
    assert sorted(layer.positions()[0, 0].tolist()) == [8, 9, 10, 11]


@pytest.mark.parametrize("size", [1, 6])
def test_chunked_attention(size: int, calls: list[int]) -> None:
    """The first token of a chunk frees all slots, and the others are one call each."""
    pair = Pair("keep_all", rows=2, window=size, chunked=True)
    pair.feed(9)
    for column in range(9, 30):
        pair.feed()
        assert pair.layers[0].length == column % size + 1
    begun = {column for column in range(9, 30) if column % size == 0}
    assert set(range(11, 30)) - set(calls) <= (begun if size > 1 else set())


def test_what_changes_the_slots_between_steps(calls: list[int]) -> None:
    pair = Pair("keep_all", rows=2)
    for change in (
        lambda layer: None,
        lambda layer: layer.crop(-2),
        lambda layer: layer.take_rows(torch.tensor([1, 0])),
        lambda layer: layer.restore(layer.state().copy()),
        LayerCache.freeze,
        lambda layer: layer.crop(-3),
        LayerCache.reset,
    ):
        pair.each(change)
        for n in (1, 1, 1, 4, 1, 1):
            pair.feed(n)
    assert len(calls) > 15


def test_forks_and_copies_write_to_their_own_slots() -> None:
    pair = Pair("window:6")
    for _ in range(8):
        pair.feed()
    before = [layer.state().copy() for layer in pair.layers]
    for branch in (LayerCache.fork, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other = Pair("window:6")
        other.layers = [branch(layer) for layer in pair.layers]
        for _ in range(3):
            other.feed()
    for layer, state in zip(pair.layers, before, strict=True):
        held = layer.state().parts["slots"]
        assert all(torch.equal(held[name], plane) for name, plane in state.parts["slots"].items())


def test_other_positions_and_shapes_are_left_to_the_parts(calls: list[int]) -> None:
    pair = Pair("keep_all", rows=2)
    for _ in range(3):
        pair.feed()
    calls.clear()
    pair.feed(position=torch.tensor([7], dtype=torch.int32))
    pair.feed(position=torch.tensor([[4], [-1]], dtype=torch.int32))
    pair.feed(position=torch.tensor([5]))
    assert not calls


def test_gradients_are_refused_as_by_parts() -> None:
    layer = Pair("keep_all").layers[0]
    q, k, v = (torch.randn(1, 2, 1, 32) for _ in range(3))
    for _ in range(2):
        layer.step(q, k, v, scale=1.0)
    with pytest.raises(StateError, match="propagate gradients: its storage is 'growing'; run the"):
        layer.step(q, k.clone().requires_grad_(), v, scale=1.0)
    assert layer.length == 2


@pytest.mark.parametrize("spec", ["keep_all", "window:4"])
def test_an_interrupt_is_taken_back_or_noticed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(spec)
    for _ in range(6):
        pair.feed()
    extend_to = Buffer.extend_to

    def interrupted(self: Buffer, length: int) -> None:
        extend_to(self, length)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "extend_to", interrupted)
        q, k, v = (torch.randn(1, 1, heads, 32).transpose(1, 2) for heads in (6, 2, 2))
        with pytest.raises(KeyboardInterrupt):
            pair.layers[0].step(q, k, v, scale=0.2)
    if spec == "keep_all":
        pair.feed()
    else:  # a slot was freed
        with pytest.raises(StateError, match="interrupted"):
            pair.layers[0].step(q, k, v, scale=0.2)


def test_a_lack_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("keep_all")
    for _ in range(3):
        pair.feed()
    q, k, v = (torch.randn(1, 1, heads, 32).transpose(1, 2) for heads in (6, 2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(native_library.LIBRARY, "kv_step", lambda *records: 1)
        with pytest.raises(MemoryError, match="scratch"):
            pair.layers[0].step(q, k, v, scale=0.2)
    pair.feed()


@pytest.fixture
def uncollected():
    """Nothing is freed but by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_layer_is_freed_with_its_last_reference(uncollected):
    pair = Pair("keep_all")
    pair.feed(5)
    for _ in range(3):
        pair.feed()
    layer = pair.layers[0]
    assert layer.plan.known  # a step was made in one call
    slots = weakref.ref(layer.storage)
    del layer, pair
    assert slots() is None


def test_a_step_keeps_no_queries_of_its_forward(uncollected):
    layer = CacheSpec.parse("keep_all").layer()
    layer.step(*(torch.randn(1, heads, 5, 32) for heads in (6, 2, 2)), scale=0.2)
    base = torch.randn(1, 500, 10, 32)
    q, k, v = base[:, 7:8].transpose(1, 2).split([6, 2, 2], dim=1)
    layer.step(q, k, v, scale=0.2)
    assert layer.plan is not None
    whole = weakref.ref(base)
    del base, q, k, v
    assert whole() is None
    layer.step(*(torch.randn(1, heads, 1, 32) for heads in (6, 2, 2)), scale=0.2)


def test_reset_frees_slots(uncollected):
    pair = Pair("keep_all")
    pair.feed(5)
    pair.feed()
    slots = weakref.ref(pair.layers[0].storage.read()["k"].untyped_storage())
    pair.each(LayerCache.reset)
    assert slots() is None


def test_slots_that_moved_between_steps():
    pair = Pair("keep_all")
    pair.feed(40)
    pair.feed()
    pair.feed()
    states = [layer.state().copy() for layer in pair.layers]
    storage = pair.layers[0].storage
    pair.feed(300, torch.cat([torch.full((1, 298), -1), torch.tensor([[42, 43]])], dim=1))
    assert pair.layers[0].storage is not storage
    for layer, state in zip(pair.layers, states, strict=True):
        layer.restore(state)
    for _ in range(3):
        pair.feed()
    pair.feed(4)


@pytest.mark.parametrize("spec", ["keep_all", "window:6"])
def test_a_prepared_step_that_fails(spec):
    pair = Pair(spec)
    pair.feed(8)
    pair.feed()
    layer = pair.layers[0]
    before = layer.state().copy()
    q, k, v = (torch.randn(1, 1, heads, 32).transpose(1, 2) for heads in (6, 2, 2))
    ready = layer.prepare()
    ready.begin()
    ready.end(FAILED)
    if spec == "keep_all":
        planes = layer.state().parts["slots"]
        assert all(torch.equal(planes[name], x) for name, x in before.parts["slots"].items())
        pair.feed()
    else:  # a slot may have been freed
        with pytest.raises(StateError, match="contents of the slots are unknown"):
            layer.step(q, k, v, scale=0.2)


def test_a_policy_that_keeps_more_than_the_window_of_its_layer() -> None:
    pair = Pair("keep_all")
    pair.layers = [LayerCache(KeepAll(), Plain(), Plain(), Growing(), window=12) for _ in range(2)]
    pair.layers[1].plans = False
    for n in (5, *[1] * 30):
        pair.feed(n)


def test_heads_that_compete_for_a_share_keep_their_floor() -> None:
    layers = [CacheSpec.parse("adakv:0.9(knorm:25%,least=6,recent=2)").layer() for _ in range(2)]
    layers[1].plans = False
    for n in (60, *[1] * 40):
        q, k, v = (torch.randn(1, heads, n, 32) for heads in (6, 2, 2))
        k[:, 0] *= 4
        outs = [layer.step(q, k, v, scale=0.2) for layer in layers]
        torch.testing.assert_close(*outs)


def test_what_was_learned_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has changed scores, although it frees no slot."""
    pair = Pair("h2o:40")
    for n in (5, 1, 1):
        pair.feed(n)

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    q, k, v = (torch.randn(1, 1, heads, 32).transpose(1, 2) for heads in (6, 2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(StepPlan, "count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.layers[0].step(q, k, v, scale=0.2)
    with pytest.raises(StateError, match="unknown"):
        pair.layers[0].step(q, k, v, scale=0.2)


@pytest.mark.filterwarnings("ignore::kvkeep.errors.PrecisionWarning")
@pytest.mark.parametrize(
    "spec",
    [
        "keydiff:96,recent=8",
        "keydiff:25%,least=40,recent=8+int8",
        "adakv(keydiff:96)",
        "keydiff:96,recent=8+int4:group=16/int8@fixed",
        "adakv(keydiff:96)+int3:recent=8,hadamard=0",
    ],
)
def test_keys_whose_mean_direction_moves(spec: str, calls: list[int]) -> None:
    """Only the keys that may be the nearest to the mean are multiplied by it."""
    pair = Pair(spec)
    pair.mean = 2 * torch.randn(2, 32, generator=pair.random)
    pair.feed(150)
    for column in range(120):
        pair.mean += 0.2 * torch.randn(2, 32, generator=pair.random)
        if column == 60:
            pair.mean = -pair.mean
        pair.feed()
    assert len(calls) > 110


def test_steps_in_and_outside_inference_mode():
    """What the library keeps of the keys is changed in both."""
    torch.manual_seed(0)
    tokens = [torch.randn(3, 1, 2, 1, 16) for _ in range(24)]
    mixed, plain = (CacheSpec.parse("keydiff:8,recent=2").layer() for _ in range(2))
    for index, (q, k, v) in enumerate(tokens):
        with torch.inference_mode() if index % 6 < 3 else torch.no_grad():
            found = mixed.step(q, k, v, scale=0.25)
        with torch.no_grad():
            expected = plain.step(q, k, v, scale=0.25)
        assert found.equal(expected)
        if index % 4 == 3:
            mixed.settler.accept()  # the next step is looked up
            mixed.freeze()
            mixed = mixed.fork()
    assert mixed.positions().sort().values.equal(plain.positions().sort().values)
