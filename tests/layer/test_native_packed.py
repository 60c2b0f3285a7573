"""Steps of several sequences in one native call, against each sequence's own."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from kvkeep import native_library
from kvkeep.errors import StateError
from kvkeep.layer.packed import PackedLayer
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import LIBRARY
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.skipif(not native_library.available, reason=native_library.reason)

MIXED = [
    "keep_all",
    "keep_all@fixed:512",
    "window:6",
    "keep_all+int8",
    "window:5,sinks=2+int8@fixed",
    "keep_all+int8/int4",
    "keep_all+kivi",
    "h2o:9",
    "window:40,sinks=3+int4:recent=8,sinks=2",
    "h2o:40+int4:recent=8,sinks=2",
    "adakv(h2o:40)+int4:recent=8,sinks=2",
    "kvzip:50%+int4:recent=8,sinks=2",
    "expected_attention:9",
    "keep_all@concat",
]


def chunk(n, dtype=torch.float32):
    """Queries, keys and values of n tokens, as models lay them out."""
    return [torch.randn(1, n, heads, 32).to(dtype).transpose(1, 2) for heads in (6, 2, 2)]


class Pair:
    """Layers that are fed together, and the same ones fed alone."""

    def __init__(self, layers):
        self.together, self.alone = layers, [layer.fork() for layer in layers]

    def feed(self, counts, dtype=torch.float32, tolerance=1e-5):
        fed = [(i, n) for i, n in enumerate(counts) if n]
        parts = [chunk(n, dtype) for _, n in fed]
        q, k, v = (
            torch.cat(x, dim=2).transpose(1, 2).contiguous().transpose(1, 2)
            for x in zip(*parts, strict=True)
        )
        packed = PackedLayer([self.together[i] for i, _ in fed], [n for _, n in fed])
        position = packed.next_positions(q.shape[2], q.device)
        packed.prepare()
        try:
            found = packed.run(StepInputs(q, k, v, position, 0.2))
        finally:
            packed.end()
        alone = [
            self.alone[i].step(*part, scale=0.2) for (i, _), part in zip(fed, parts, strict=True)
        ]
        torch.testing.assert_close(found, torch.cat(alone, dim=2), atol=tolerance, rtol=tolerance)
        self.check()

    def check(self):
        for one, other in zip(self.together, self.alone, strict=True):
            assert (one.fed, one.length, one.rollback_limit) == (
                other.fed,
                other.length,
                other.rollback_limit,
            )
            for part, planes in other.state().parts.items():
                held = one.state().parts[part]
                assert all(torch.equal(held[name], plane) for name, plane in planes.items())


@pytest.fixture
def together(monkeypatch):
    """How many sequences each native call of several had."""
    found = []
    make = LIBRARY.kv_step

    def counted(sequences, count, tokens):
        if count > 1:
            found.append(count)
        return make(sequences, count, tokens)

    monkeypatch.setattr(LIBRARY, "kv_step", counted)
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.filterwarnings("ignore::kvkeep.errors.PrecisionWarning")
def test_each_sequence_gets_what_it_gets_alone(dtype, tolerance, together):
    torch.manual_seed(0)
    # In half precision scores of h2o differ in their last bits, and with them the slots kept.
    exact = dtype is torch.float32
    specs = [spec for spec in MIXED if exact or "h2o" not in spec]
    slopes = (0.5, 0.1, -0.2, 0.0, 0.03, 1.0) if exact else None
    pair = Pair([CacheSpec.parse(spec).layer(capacity=512, slopes=slopes) for spec in specs])
    pair.feed([3 + 40 * i for i in range(len(specs))], dtype, tolerance)
    for step in range(40):
        counts = [1] * len(specs)
        if step % 7 == 3:
            counts[step % len(specs)] = 4  # a chunk of a prompt among them
        if step % 7 == 5:
            counts[step % len(specs)] = 0
        pair.feed(counts, dtype, tolerance)
    assert len(together) > 30
    assert max(together) >= 6  # all but what evicts by score, concatenates, or encodes a block


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8"])
def test_sequences_that_share_a_beginning(spec, together):
    """A tree: some share 300 slots, two of those 150 more; one shares 20, and two are alone."""
    torch.manual_seed(1)
    root = CacheSpec.parse(spec).layer()

    def grown(layer, n):
        layer.step(*chunk(n), scale=0.2)
        layer.freeze()
        return layer

    root = grown(root, 300)
    branch = grown(root.fork(), 150)
    small = grown(CacheSpec.parse(spec).layer(), 20)
    apart = [CacheSpec.parse(spec).layer() for _ in range(2)]
    layers = [root.fork(), apart[0], branch.fork(), small.fork(), root.fork(), branch.fork()]
    pair = Pair([*layers, small.fork(), apart[1]])
    pair.feed([5, 200, 1, 7, 130, 1, 2, 3], tolerance=1e-4)
    for _ in range(70):
        pair.feed([1] * 8, tolerance=1e-4)
    assert together[-1] == 8


def test_other_inputs_than_before_are_left_to_each_layer(together):
    pair = Pair([CacheSpec.parse("keep_all").layer() for _ in range(3)])
    for _ in range(3):
        pair.feed([1, 1, 1])
    assert together == [3, 3]
    for change in (
        lambda x: x._replace(scale=0.3),
        lambda x: x._replace(k=x.k.contiguous(), v=x.v.contiguous()),
    ):
        together.clear()
        inputs = StepInputs(*chunk(3), None, 0.2)
        packed = PackedLayer(pair.together, [1, 1, 1])
        inputs = change(inputs._replace(position=packed.next_positions(3, inputs.q.device)))
        packed.prepare()
        found = packed.run(inputs)
        packed.end()
        assert not together
        alone = [
            layer.run(
                inputs._replace(
                    **{name: getattr(inputs, name)[:, :, i : i + 1] for name in "qkv"},
                    position=inputs.position[i : i + 1],
                )
            )
            for i, layer in enumerate(pair.alone)
        ]
        torch.testing.assert_close(found, torch.cat(alone, dim=2))
        pair.check()
        for _ in range(2):
            pair.feed([1, 1, 1])
        assert together == [3]


def test_positions_that_are_not_the_next_are_left_to_each_layer(together):
    layers = [CacheSpec.parse("keep_all").layer() for _ in range(2)]
    pair = Pair(layers)
    for _ in range(3):
        pair.feed([1, 1])
    packed = PackedLayer(layers, [1, 1])
    packed.prepare()
    packed.run(StepInputs(*chunk(2), torch.tensor([3, 7], dtype=torch.int32), 0.2))
    packed.end()
    assert [layer.positions()[0, 0, -1].item() for layer in layers] == [3, 7]


@pytest.mark.parametrize("spec", ["keep_all", "window:4"])
def test_a_failure_is_taken_back_or_noticed(spec, monkeypatch):
    pair = Pair([CacheSpec.parse(spec).layer() for _ in range(2)])
    for _ in range(6):
        pair.feed([1, 1])
    with monkeypatch.context() as patch:
        patch.setattr(LIBRARY, "kv_step", lambda *args: 1)
        with pytest.raises(MemoryError, match="scratch"):
            pair.feed([1, 1])
    if spec == "keep_all":
        pair.check()
        pair.feed([1, 1])
    else:  # a slot may have been freed
        with pytest.raises(StateError, match="interrupted"):
            pair.feed([1, 1])


def test_another_thread_is_refused_until_the_end():
    pair = Pair([CacheSpec.parse("keep_all").layer() for _ in range(2)])
    for _ in range(3):
        pair.feed([1, 1])
    packed, errors = PackedLayer(pair.together, [1, 1]), []

    def crop():
        try:
            pair.together[1].crop(-1)
        except StateError as error:
            errors.append(str(error))

    packed.prepare()
    thread = Thread(target=crop)
    thread.start()
    thread.join()
    packed.end()
    assert "another thread" in errors[0]
    pair.check()
    pair.feed([1, 1])
