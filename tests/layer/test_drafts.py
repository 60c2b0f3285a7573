"""Chunks of drafts, of which some are taken back, against a layer fed the accepted tokens alone."""

from __future__ import annotations

import copy

import pytest
import torch

from kvkeep.attention import Options, dispatch
from kvkeep.errors import RollbackError, StateError, UnsupportedError
from kvkeep.layer.beginning import begin_with
from kvkeep.layer.history import Prompt
from kvkeep.planes import concatenated, take
from kvkeep.policy import Observation
from kvkeep.spec import CacheSpec
from kvkeep.testing import CODEC_EXAMPLES, EXAMPLES, live_tokens

HEADS, GROUP, DIM, PROMPT = 2, 2, 16, 14
ROUNDS = [(1, 0), (5, 2), (4, 4), (6, 0), (3, 1), (7, 3), (1, 1), (5, 0)]
"""How many tokens are fed, and how many of them are taken back."""

TIGHT = [
    "h2o:8@fixed:8",
    "h2o:8@fixed:9",
    "adakv:0.3(h2o:8,recent=2)@host",
    "adakv:0.3(knorm:8,recent=2)@concat",
    "tova:8@concat",
    "snapkv:8,window=4,pool=3@host",
    "window:6,sinks=2@fixed:8",
    "window:50%,least=6",
    "h2o:40%,least=6",
    "knorm:40",  # nothing is evicted
    "qh2o:8,recent=2+int8",
    "expected_attention:8,sinks=2,future=16+fp8@fixed:64",
    "keydiff:8+int8/int4@host",
    "keep_all+" + CODEC_EXAMPLES["kivi"],
    "keep_all+kivi:4,together=4,recent=0,sinks=0@concat",
]


def drawn(seed, n, rows):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, heads, n, DIM, generator=generator)
        for heads in (HEADS * GROUP, HEADS, HEADS)
    ]


def position(start, n, pads):
    """Positions of n columns, (B, n), if `pads` gives the padding in front of each row."""
    if not any(pads):
        return None
    return (torch.arange(start, start + n) - torch.tensor(pads)[:, None]).clamp(min=-1)


def step(layer, inputs, pads, first=0, n=None):
    n = inputs[0].shape[2] if n is None else n
    part = [x[:, :, first : first + n] for x in inputs]
    return layer.step(*part, position(layer.fed, n, pads), scale=0.3)


def verified(layer, alone, pads=(0,), rounds=ROUNDS):
    """Feed rounds of drafts to `layer`, and the tokens that are left to `alone`, one by one."""
    layer.record_past, layer.cursor.prompt = True, Prompt(PROMPT)
    for turn, (n, rejected) in enumerate([(PROMPT + 3, 2), *rounds]):
        inputs = drawn(turn, n, len(pads))
        read = 0 if layer.fed else PROMPT
        out = step(layer, inputs, pads)
        assert layer.rollback_limit >= n - read
        layer.crop(-rejected)
        kept = n - rejected
        pieces = [(0, PROMPT)] if read else []
        pieces += [(i, 1) for i in range(read, kept)]
        expected = [step(alone, inputs, pads, *piece) for piece in pieces]
        if expected:
            torch.testing.assert_close(
                out[:, :, :kept], torch.cat(expected, dim=2), atol=1e-5, rtol=1e-4
            )
        require_alike(layer, alone)


def sorted_state(layer):
    """Everything that slots hold, in the order of positions."""
    parts = {name: dict(planes) for name, planes in layer.state().parts.items()}
    aside = parts.pop("aside", None)
    if aside is not None:  # what has not moved to the storage yet
        parts["slots"] = concatenated(parts["slots"], aside)
    found = []
    for part, planes in parts.items():
        place = planes["position"]
        blocks = part == "bulk"  # which lie in order
        order = torch.arange(len(place[0, 0]))[None, None] if blocks else place.argsort(dim=2)
        for _, plane in sorted(take(planes, order).items()):
            real = take({"": place}, order)[""] >= 0
            real = real.reshape(*real.shape, *[1] * (plane.dim() - real.dim()))
            found.append(plane.float() if blocks else plane.float().masked_fill(~real, 0))
    return found


def require_alike(layer, alone):
    assert (layer.fed, layer.length) == (alone.fed, alone.length)
    assert layer.stats().live_bytes == alone.stats().live_bytes
    mine, its = live_tokens(layer), live_tokens(alone)
    for row, other in zip(mine, its, strict=True):
        for head, single in zip(row, other, strict=True):
            assert sorted(head[0]) == sorted(single[0])
    for x, y in zip(sorted_state(layer), sorted_state(alone), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    ours, theirs = layer.history.memory, alone.history.memory
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], atol=1e-3, rtol=1e-4)


def pair(spec, **options):
    return [CacheSpec.parse(spec).layer(capacity=64, **options) for _ in range(2)]


@pytest.mark.parametrize("spec", [*EXAMPLES.values(), *TIGHT])
def test_what_is_left_is_what_one_token_at_a_time_leaves(spec):
    verified(*pair(spec))


@pytest.mark.parametrize("spec", [*EXAMPLES.values(), "h2o:8@fixed:8"])
def test_rows_with_padding(spec):
    verified(*pair(spec), pads=(9, 0, 1))


@pytest.mark.parametrize("spec", ["h2o:8", "keep_all", "knorm:40"])
def test_a_layer_with_a_window_of_its_own(spec):
    verified(*pair(spec, window=10))


@pytest.mark.parametrize("spec", ["h2o:8", "keep_all+kivi:4,together=4,recent=1"])
def test_what_a_layer_began_with_is_hidden_too(spec):
    text = CacheSpec.parse("keep_all").layer()
    step(text, drawn(99, 7, 1), (0,))
    before = [x.clone() for x in sorted_state(text)]
    layer, alone = pair(spec)
    for each in (layer, alone):
        begin_with(each, text)
        step(each, drawn(98, 3, 1), (0,))
    layer.record_past = True
    inputs = drawn(0, 7, 1)
    step(layer, inputs, (0,))
    layer.crop(-2)
    for i in range(5):
        step(alone, inputs, (0,), i, 1)
    require_alike(layer, alone)
    assert all(x.equal(y) for x, y in zip(before, sorted_state(text), strict=True))


FORKED = ["h2o:16", "snapkv:16,window=4", "h2o:8", "keep_all+kivi:4,together=4"]


@pytest.mark.parametrize("spec", FORKED)
def test_a_fork_leaves_the_frozen_slots_as_they_were(spec):
    layer, alone = pair(spec)
    for each in (layer, alone):
        step(each, drawn(99, 12, 1), (0,))
        each.freeze()
    fork, single = layer.fork(), alone.fork()
    before = sorted_state(layer)
    fork.record_past = True
    for turn, (n, rejected) in enumerate(ROUNDS):
        inputs = drawn(turn, n, 1)
        step(fork, inputs, (0,))
        fork.crop(-rejected)
        for i in range(n - rejected):
            step(single, inputs, (0,), i, 1)
        require_alike(fork, single)
    assert all(x.equal(y) for x, y in zip(before, sorted_state(layer), strict=True))


LEARNING = ["h2o:8,recent=3", "adakv:0.3(snapkv:8,window=4)", "expected_attention:8,sinks=2"]


def recording(spec, *, rows=1, chunk=5):
    """A layer that holds a prompt, and then a chunk of drafts."""
    layer = CacheSpec.parse(spec).layer(capacity=64)
    step(layer, drawn(0, PROMPT, rows), (0,) * rows)
    layer.record_past = True
    if chunk:
        step(layer, drawn(1, chunk, rows), (0,))
    return layer


def planes_of(layer):
    """Copies of all slots, in the order in which they lie, and of the state of each row."""
    own = layer.slots.evictable()
    found = {name: own[name].clone() for name in own}
    return found | {f"memory.{name}": x.clone() for name, x in layer.history.memory.items()}


def require_equal(first, second):
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("spec", [*LEARNING, "keep_all+kivi:4,together=4,recent=2"])
def test_what_is_left_of_several_chunks(spec):
    """As a draft model feeds them: several chunks come before a crop of most of them."""
    layer, alone = recording(spec, chunk=0), recording(spec, chunk=0)
    alone.record_past = False
    for turn, n in enumerate((2, 1, 1, 1, 3, 1)):
        step(layer, drawn(turn, n, 1), (0,))
    layer.crop(-6)
    for turn, n in enumerate((2, 1)):
        for i in range(n):
            step(alone, drawn(turn, n, 1), (0,), i, 1)
    require_alike(layer, alone)


def test_how_many_tokens_can_be_taken_back():
    layer = recording("h2o:8")
    assert layer.rollback_limit == 5
    with pytest.raises(RollbackError, match=r"crop of 6 tokens, but 5 .* set record_past before"):
        layer.crop(-6)
    layer.crop(-2)
    assert layer.rollback_limit == 0
    layer = recording("knorm:20")  # which had evicted nothing before the drafts
    assert (layer.rollback_limit, layer.length) == (PROMPT + 5, PROMPT + 5)
    step(layer, drawn(2, 3, 1), (0,))
    assert layer.slots.hidden == 2
    layer.crop(-10)
    assert (layer.rollback_limit, layer.length) == (12, 12)


def test_tokens_that_a_policy_must_see_one_by_one():
    layer = recording("h2o:8")
    before, fed = planes_of(layer), layer.fed
    _, k, v = drawn(3, 2, 1)
    with pytest.raises(StateError, match="policy h2o decides after each token; use step"):
        layer.extend(k, v)
    assert layer.fed == fed
    require_equal(planes_of(layer), before)


CHANGES = {
    "state": lambda layer: layer.state(),
    "freeze": lambda layer: layer.freeze(),
    "rows": lambda layer: layer.take_rows(torch.tensor([0])),
    "no more recording": lambda layer: (setattr(layer, "record_past", False), layer.settle()),
    "crop": lambda layer: layer.crop(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", ["h2o:8,recent=3", "adakv:0.3(snapkv:8,window=4)"])
def test_what_makes_drafts_certain(spec, change):
    layer, alone = recording(spec), recording(spec, chunk=0)
    alone.record_past = False
    CHANGES[change](layer)
    inputs = drawn(1, 5, 1)
    for i in range(5):
        step(alone, inputs, (0,), i, 1)
    assert (layer.rollback_limit, layer.slots.hidden) == (0, 0)
    require_alike(layer, alone)


def test_recording_may_end_between_a_tokens_attention_and_its_settling():
    layer, alone = recording("h2o:8"), recording("h2o:8")
    alone.crop(0)
    q, k, v = drawn(4, 1, 1)
    view = layer.extend(k, v)
    _, mass = dispatch(q, view, Options(0.3, need_mass=True))
    layer.record_past = False
    layer.settle(Observation(mass, queries=q, scale=0.3))
    step(alone, [q, k, v], (0,))
    alone.crop(0)
    require_alike(layer, alone)


@pytest.mark.parametrize("copied", [lambda layer: layer.fork(), copy.deepcopy])
def test_a_copy_takes_back_what_the_original_keeps(copied):
    layer, alone = recording("h2o:8"), recording("h2o:8")
    other = copied(layer)
    layer.crop(0)
    other.crop(-3)
    require_alike(layer, (alone.crop(0), alone)[1])
    alone = recording("h2o:8")
    alone.crop(-3)
    require_alike(other, alone)


MOMENTS = ["victims", "observe", "hide", "write_plane", "attend"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("spec", ["h2o:8,recent=3@fixed:10", "adakv:0.3(h2o:8)"])
def test_a_chunk_that_fails_is_taken_back(spec, moment, monkeypatch):
    """At its third token, in each part of its step."""
    layer = recording(spec)
    before, limit = planes_of(layer), layer.rollback_limit
    calls = []

    def failing(method):
        def fail(*args, **options):
            calls.append(1)
            done = method(*args, **options)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return done

        return fail

    attend = failing(dispatch) if moment == "attend" else None
    if moment in ("victims", "observe"):
        kind = type(layer.policy)
        monkeypatch.setattr(kind, moment, failing(getattr(kind, moment)))
    elif moment != "attend":
        monkeypatch.setattr(layer.slots, moment, failing(getattr(layer.slots, moment)))
    inputs = drawn(3, 4, 1)
    with pytest.raises(KeyboardInterrupt):
        layer.step(*inputs, scale=0.3, attend=attend)
    monkeypatch.undo()
    assert layer.rollback_limit == limit
    require_equal(planes_of(layer), before)
    out = step(layer, inputs, (0,))
    alone = recording(spec)
    assert step(alone, inputs, (0,)).equal(out)
    for each in (layer, alone):
        each.crop(-6)
    require_alike(layer, alone)


def test_a_whole_chunk_of_drafts_is_taken_back_where_nothing_is_decided():
    layer = CacheSpec.parse("window:6").layer()
    layer.record_past, layer.cursor.prompt = True, Prompt(4)
    calls = []

    def attend(*args):
        calls.append(1)
        if len(calls) == 2:  # of the drafts; the prompt was read
            raise MemoryError
        return dispatch(*args)

    with pytest.raises(MemoryError):
        layer.step(*drawn(0, 7, 1), scale=0.3, attend=attend)
    assert (layer.fed, layer.length) == (0, 0)


@pytest.mark.parametrize("spec", ["h2o:8@concat", "adakv(h2o:8)", "tova:8@host"])
def test_hidden_slots_keep_their_contents(spec):
    """Nothing but small planes is written while a crop may come: no key or value moves."""
    layer = recording(spec, chunk=0)
    before = planes_of(layer)
    step(layer, drawn(1, 5, 1), (0,))
    after = planes_of(layer)
    for name in ("k", "v"):
        assert after[name][:, :, : before[name].shape[2]].equal(before[name])


@pytest.mark.parametrize("spec", ["h2o:6", "knorm:40", "keep_all", "keep_all+kivi:4,sinks=0"])
def test_a_failed_chunk_is_undone_while_its_error_is_still_held(spec):
    """An error keeps the step's frames; undoing must not wait for them."""
    layer, calls = CacheSpec.parse(spec).layer(), []
    step(layer, drawn(0, 6, 1), (0,))
    layer.record_past = True

    def failing(*call):
        calls.append(call)
        if len(calls) == 3 or layer.fed > 9:
            raise KeyboardInterrupt
        return dispatch(*call)

    with pytest.raises(KeyboardInterrupt) as kept:
        layer.step(*drawn(1, 5, 1), scale=0.3, attend=failing)
    assert (layer.fed, layer.length) == (6, 6)
    step(layer, drawn(2, 2, 1), (0,))
    held = layer.fed, layer.length
    del kept
    assert (layer.fed, layer.length) == held
    assert layer.fed == 8


def test_tokens_that_see_later_drafts_are_refused():
    layer = CacheSpec.parse("h2o:8").layer()
    layer.record_past, layer.cursor.prompt = True, Prompt(PROMPT)
    q, k, v = drawn(0, PROMPT + 2, 1)
    until = torch.arange(PROMPT + 2)
    image = until.clone()
    image[3:6] = 5  # within the prompt
    layer.step(q, k, v, scale=0.3, until=image)
    layer.reset()
    until[PROMPT:] = PROMPT + 1
    for later in ({"until": until}, {"causal": False}):
        with pytest.raises(UnsupportedError, match="while drafts are recorded"):
            layer.step(q, k, v, scale=0.3, **later)
        assert layer.fed == 0


def test_beginning_to_record_evicts_nothing():
    text, layer = CacheSpec.parse("keep_all").layer(), CacheSpec.parse("h2o:8").layer()
    step(text, drawn(0, PROMPT, 1), (0,))
    begin_with(layer, text)
    layer.record_past = True
    assert layer.length == PROMPT
