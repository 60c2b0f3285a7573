"""compress: which slots stay, against weights computed directly; what follows; and refusals."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from support.sweep_configs import model_of
from support.tiny_host import tiny_model
from support.tiny_models import tiny

import kvkeep
from kvkeep import native_library
from kvkeep.errors import ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.generate import SamplingParams, stream
from kvkeep.host import host_of
from kvkeep.host.compress import Rereading, stop_evicting
from kvkeep.layer.decode.plan import StepPlan
from kvkeep.planes import POSITION

TOKENS = 50
TAIL = "int4:recent=8,sinks=2"
"""8 to 39 newest tokens are plain."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = tiny("llama", max_position_embeddings=64)
    kvkeep.attach(model)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def filled(model, ids, spec="keep_all", **options):
    cache = kvkeep.Cache(model, spec, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def kept(layer):
    """Positions that each head keeps."""
    return [sorted(p for p in head.tolist() if p >= 0) for head in layer.positions()[0]]


@pytest.fixture
def readings(monkeypatch):
    """The layers of all second readings, with what each was given."""
    found = []
    run = Rereading.run

    def recorded(layer, inputs):
        out = run(layer, inputs)
        found.append((layer, inputs, out))
        return out

    monkeypatch.setattr(Rereading, "run", recorded)
    return found


@pytest.mark.parametrize("chunk", [64, 20])
def test_the_slots_of_greatest_weight_of_all_heads_stay(model, ids, readings, chunk):
    cache = filled(model, ids)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.compress(model, ids, f"kvzip:40%,sinks=3,recent=0,chunk={chunk}")
    parts = -(-TOKENS // chunk)
    borders = [TOKENS * i // parts for i in range(parts + 1)]
    scores = torch.zeros(2, 2, TOKENS)  # layer, head, token
    for number, (_, (q, k, v, position, scale, *_), out) in enumerate(readings):
        part, index = divmod(number, 2)
        first, end = borders[part], borders[part + 1]
        # Directly after the part, which may end at the model's last position.
        assert position.tolist() == list(range(end, 2 * end - first))
        seen = [*range(min(3, first)), *range(first, end)]
        keys = torch.cat([held[index][0][:, :, seen], k], dim=2).repeat_interleave(2, 1)
        values = torch.cat([held[index][1][:, :, seen], v], dim=2).repeat_interleave(2, 1)
        logits = q @ keys.transpose(2, 3) * scale
        hidden = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).triu(len(seen) + 1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(out, weights @ values, atol=1e-5, rtol=1e-4)
        largest = weights.view(2, 2, *weights.shape[2:]).amax(dim=(1, 2))
        scores[index, :, first:end] = largest[:, len(seen) - (end - first) : len(seen)]
    scores[..., :3] = torch.inf
    most = set(scores.flatten().topk(4 * 20).indices.tolist())
    expected = [
        [[t for t in range(TOKENS) if ((i * 2 + h) * TOKENS + t) in most] for h in range(2)]
        for i in range(2)
    ]
    assert [kept(layer) for layer in cache.layers] == expected
    assert len({len(head) for layer in expected for head in layer}) > 1


def test_the_newest_tokens_stay_in_every_head(model, ids):
    cache = filled(model, ids)
    cache.compress(model, ids, "kvzip:40%,recent=6")
    assert all({*range(4), *range(44, 50)} <= set(head) for x in cache.layers for head in kept(x))
    cache = filled(model, ids)
    cache.compress(model, ids, "kvzip:20%")  # 10 slots, of which 3 are for the newest tokens
    assert all({*range(4), *range(47, 50)} <= set(head) for x in cache.layers for head in kept(x))
    assert sum(len(head) for x in cache.layers for head in kept(x)) == 40


@pytest.mark.parametrize(
    "spec", ["kvzip:30%", "kvzip:30%+int8", "kvzip:30%+int8/int4", f"kvzip:30%+{TAIL}"]
)
def test_later_steps_are_one_native_call(model, ids, spec, monkeypatch):
    """Logits of the call for all heads, and of one call for each; over a growth of the storages."""
    whole = filled(model, ids)
    whole.compress(model, ids, spec)
    runs, count = [], StepPlan.count
    monkeypatch.setattr(StepPlan, "count", lambda *x: runs.append(x) or count(*x))

    def steps(cache):
        found = []
        with torch.no_grad():
            for token in range(3, 13):
                out = model(torch.tensor([[token]]), past_key_values=cache)
                found.append(out.logits)
        return torch.cat(found)

    one = steps(deepcopy(whole))
    assert len(runs) >= 6 or not native_library.available  # where no storage grows
    del runs[:]
    other = deepcopy(whole)
    for layer in other.layers:
        layer.plans = False
    other = steps(other)
    assert not runs
    torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("spec", ["kvzip:30%", f"kvzip:30%+{TAIL}"])
def test_empty_slots_of_a_row_that_was_shorter_are_not_seen(model, spec):
    rows = torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    cache = filled(model, rows, spec)
    cache.compress(model, rows)
    cache.select([0])
    assert any(bool((x.position < 0).any()) for x in cache.layers[0].slots.segments())
    other = deepcopy(cache)
    for layer in other.layers:
        layer.plans = False
    with torch.no_grad():
        for token in torch.arange(3, 8).view(-1, 1, 1):
            a, b = (model(token, past_key_values=x).logits for x in (cache, other))
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.skipif(not native_library.available, reason="the step is the native library's")
def test_a_native_step_that_fails_is_taken_back(model, ids, monkeypatch):
    cache = filled(model, ids)
    cache.compress(model, ids, "kvzip:30%")
    token = torch.tensor([[5]])
    with torch.no_grad():
        model(token, past_key_values=cache)
        expected = model(token, past_key_values=deepcopy(cache)).logits
        before = [layer.positions().clone() for layer in cache.layers]

        def interrupted(*given):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StepPlan, "count", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(token, past_key_values=cache)
        cache.layers[0].cursor.mend()
        assert torch.equal(cache.layers[0].positions(), before[0])
        torch.testing.assert_close(model(token, past_key_values=cache).logits, expected)


def test_uniform_heads_keep_equally_many(model, ids):
    cache = filled(model, ids)
    cache.compress(model, ids, "kvzip:30%,uniform=1")
    assert [[len(head) for head in kept(layer)] for layer in cache.layers] == [[15, 15]] * 2


def test_a_whole_share_changes_nothing(model, ids):
    cache, other = filled(model, ids), filled(model, ids)
    cache.compress(model, ids, "kvzip:100%")
    more = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        a, b = (model(more, past_key_values=x).logits for x in (cache, other))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert str(cache.specs[0]) == "kvzip:100%+plain@growing"


def test_slots_are_encoded_as_the_new_spec_says(model, ids):
    cache = filled(model, ids)
    plain = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.compress(model, ids, "kvzip:100%+int8")
    for layer, (k, v) in zip(cache.layers, plain, strict=True):
        codec = layer.key_codec
        expected = codec.decode(codec.encode(k), k.dtype), codec.decode(codec.encode(v), v.dtype)
        assert torch.equal(layer.keys, expected[0])
        assert (layer.values - v).abs().max() < 0.02 * v.abs().max()


def test_each_row_keeps_what_it_keeps_alone(model, ids):
    rows = torch.cat([ids, ids.flip(1), ids.roll(7, 1)])
    cache = filled(model, rows)
    cache.compress(model, rows, "kvzip:40%")
    after = torch.tensor([[5, 6], [7, 8], [9, 10]])
    with torch.no_grad():
        logits = model(after, past_key_values=cache).logits
    for row in range(3):
        alone = filled(model, rows[row : row + 1])
        alone.compress(model, rows[row], "kvzip:40%")
        for one, other in zip(cache.layers, alone.layers, strict=True):
            positions = [
                sorted(p for p in head.tolist() if p >= 0) for head in one.positions()[row]
            ]
            assert [head[:-2] for head in positions] == kept(other)
        with torch.no_grad():
            own = model(after[row : row + 1], past_key_values=alone).logits
        torch.testing.assert_close(logits[row : row + 1], own, atol=1e-4, rtol=1e-4)


def test_a_prompt_is_compressed_before_its_last_token(model, ids):
    host = host_of(model)
    cache, expected = host.new_cache("kvzip:40%"), filled(model, ids[:, :-1])
    expected.compress(model, ids[:, :-1], "kvzip:40%")
    *_, last = stream(model, ids, SamplingParams(4, end_tokens=frozenset()), cache=cache)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, past_key_values=kvkeep.Cache(model, "kvzip:40%"), **options)
    assert last.answer.ids.equal(wanted[0])
    ends = [head[:-4] for layer in cache.layers for head in kept(layer)]
    assert ends == [head for layer in expected.layers for head in kept(layer)]


def test_generate_compresses_a_prompt(model, ids):
    options = {"max_new_tokens": 5, "do_sample": False}
    cache = filled(model, ids[:, :-1])
    cache.compress(model, ids[:, :-1], "kvzip:40%")
    expected = model.generate(ids, past_key_values=cache, **options)
    given = kvkeep.Cache(model, "kvzip:40%")
    assert torch.equal(model.generate(ids, past_key_values=given, **options), expected)
    assert [kept(layer) for layer in given.layers] == [kept(layer) for layer in cache.layers]
    kvkeep.detach(model)
    try:
        with kvkeep.attach(model, "kvzip:40%"):
            assert torch.equal(model.generate(ids, **options), expected)
            with pytest.raises(UnsupportedError, match="one row"):
                model.generate(ids.repeat(2, 1), **options)
            drafted = model.generate(ids, prompt_lookup_num_tokens=2, **options)
            assert torch.equal(drafted, expected)
            with pytest.raises(UnsupportedError, match="no prompt of a draft model"):
                model.generate(ids, assistant_model=model, **options)
    finally:
        kvkeep.attach(model)
    with pytest.raises(UnsupportedError, match="reads a prompt twice"):
        kvkeep.Batch(model, spec="kvzip:40%")


@pytest.mark.parametrize("codec", ["plain", "int8", "int8/int4"])
def test_slots_that_stay_are_not_encoded_again_and_the_others_are_freed(model, ids, codec):
    cache = filled(model, ids, f"keep_all+{codec}")
    before = [
        {name: x.clone() for name, x in layer.slots.evictable().items()} for layer in cache.layers
    ]
    bytes_before, allocated = cache.live_bytes, cache.nbytes
    cache.compress(model, ids, f"kvzip:40%+{codec}")
    for layer, planes in zip(cache.layers, before, strict=True):
        for head, positions in enumerate(kept(layer)):
            own = layer.state().parts[f"head.{head}"]
            order = own[POSITION][0, 0].argsort()
            for name, plane in planes.items():
                if name != POSITION:
                    assert torch.equal(own[name][0, 0, order], plane[0, head, positions])
    # Positions are kept by head; before, the heads shared them.
    shared = 4 * TOKENS * len(cache.layers)
    assert cache.live_bytes == int((bytes_before + shared) * 0.4)
    assert cache.nbytes < allocated
    assert (cache.fed, cache.seen.tolist()) == (TOKENS, [TOKENS])


def codes(layer, head):
    """Position -> the planes of an encoded slot of a layer of one row, and of its plain tail."""
    coded = layer.slots.blocks.evictable()
    names = [name for name in coded if name != POSITION]
    place = coded[POSITION][0, -1 if coded[POSITION].shape[1] == 1 else head].tolist()
    return {p: [coded[x][0, head, i].clone() for x in names] for i, p in enumerate(place) if p >= 0}


def same(planes, others):
    return all(map(torch.equal, planes, others))


def plain(layer):
    """Position -> the keys and values of all heads of a token in the plain tail."""
    tail = layer.slots.tail.evictable()
    place = tail[POSITION][0, 0].tolist()
    return {p: torch.cat([tail["k"][0, :, i], tail["v"][0, :, i]]) for i, p in enumerate(place)}


@pytest.mark.parametrize("before", ["keep_all", "kvzip:40%"])
def test_codes_are_not_encoded_again_and_the_newest_tokens_stay_plain(model, ids, before):
    cache = filled(model, ids, f"{before}+{TAIL}")
    coded = [[codes(layer, head) for head in range(2)] for layer in cache.layers]
    tails = [plain(layer) for layer in cache.layers]
    assert len(coded[0][0]) == 40
    cache.compress(model, ids, f"kvzip:40%,recent=12+{TAIL}")
    assert sum(len(head) for x in cache.layers for head in kept(x)) == 4 * int(0.4 * TOKENS)
    for layer, heads, tail in zip(cache.layers, coded, tails, strict=True):
        now = plain(layer)
        assert {0, 1, *range(42, 50)} <= set(now)
        assert all(x.equal(tail[p]) for p, x in now.items())
        for head, was in enumerate(heads):
            found = codes(layer, head)
            assert not set(found) & set(now)
            assert all(same(found[p], was[p]) for p in set(found) & set(was))


@pytest.mark.parametrize("share", [20, 50])
def test_tokens_are_encoded_before_a_plain_tail_as_if_they_had_been_fed(model, ids, share):
    cache, other = filled(model, ids), filled(model, ids, f"keep_all+{TAIL}")
    was = codes(other.layers[0], 0)
    cache.compress(model, ids, f"kvzip:{share}%,recent=0+{TAIL}")
    found = codes(cache.layers[0], 0)
    assert len(set(found) & set(was)) > 2
    assert all(same(found[p], was[p]) for p in set(found) & set(was))
    assert sum(len(head) for x in cache.layers for head in kept(x)) == 4 * TOKENS * share // 100
    assert model_goes_on(model, cache)


@pytest.mark.parametrize("spec", ["kvzip:40%", f"kvzip:40%,recent=0+{TAIL}"])
def test_a_compressed_cache_goes_on_and_is_saved_forked_and_rewound(model, ids, tmp_path, spec):
    cache = filled(model, ids, spec)
    assert cache.length == TOKENS
    cache.compress(model, ids)
    held = [kept(layer) for layer in cache.layers]
    cache.save(tmp_path / "cache")
    copies = [cache, kvkeep.load(tmp_path / "cache", model), cache.freeze().fork()]
    with torch.no_grad():
        logits = [model(torch.tensor([[5, 6]]), past_key_values=x).logits for x in copies]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    cache.rewind(TOKENS)
    assert [kept(layer) for layer in cache.layers] == held
    with pytest.raises(kvkeep.RollbackError):
        cache.rewind(TOKENS - 1)
    cache.reset()
    assert cache.length == 0


@torch.no_grad()
@pytest.mark.parametrize(
    "spec",
    [
        *("snapkv:12,window=4", "adakv(h2o:14)", "h2o:12+int8", "window:9,sinks=2"),
        *(f"h2o:14+{TAIL}", f"adakv(h2o:24)+{TAIL}"),
    ],
)
def test_a_cache_that_stops_evicting_keeps_what_comes(model, ids, spec):
    """Attention precedes eviction, so the next chunk is computed as without; but with a window,
    whose queries would not see all slots."""
    cache, later = filled(model, ids, spec), ids[:, :7]
    before = [kept(layer) for layer in cache.layers]
    expected = model(later, past_key_values=cache.freeze().fork()).logits
    stop_evicting(cache)
    assert [kept(layer) for layer in cache.layers] == before
    found = model(later, past_key_values=cache).logits
    if spec.startswith("window"):
        assert not torch.allclose(found, expected, atol=1e-2)
    else:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    model(ids[:, :1], past_key_values=cache)
    new = [*range(TOKENS, TOKENS + 8)]
    assert [kept(layer) for layer in cache.layers] == [[x + new for x in heads] for heads in before]


def test_layers_with_a_window_keep_it(ids):
    gemma = tiny("gemma3")
    kvkeep.attach(gemma)
    cache = filled(gemma, ids)
    windowed, whole = cache.layers
    held = kept(windowed)
    cache.compress(gemma, ids, "kvzip:40%")
    assert cache.layers[0] is windowed
    assert kept(windowed) == held
    assert sum(map(len, kept(cache.layers[1]))) == int(0.4 * TOKENS) * whole.history.geometry.heads
    assert model_goes_on(gemma, cache)


@torch.no_grad()
def model_goes_on(model, cache):
    return model(torch.tensor([[5]]), past_key_values=cache).logits.isfinite().all()


def test_what_cannot_be_compressed(model, ids):
    cache = filled(model, ids)
    held = cache.layers
    for error, words, given, spec in (
        (
            ShapeError,
            r"token ids \(1, 49\) for a cache that was fed \(1, 50\)",
            ids[:, 1:],
            "kvzip:25%",
        ),
        (SpecError, "policy h2o; give a spec such as kvzip", ids, "h2o:9"),
        (SpecError, "codec kivi encodes blocks", ids, "kvzip:25%+kivi"),
    ):
        with pytest.raises(error, match=words):
            cache.compress(model, given, spec)
    twice = filled(model, ids, "kvzip:50%")
    twice.compress(model, ids)
    for other, error, words in (
        (filled(model, ids, "h2o:30"), StateError, "compress a cache of keep_all"),
        (twice, StateError, "once"),
        (filled(model, ids.repeat(2, 1)), ShapeError, r"fed \(2, 50\)"),
        (filled(model, ids, "keep_all+kivi:4,together=4"), SpecError, "encodes blocks"),
    ):
        with pytest.raises(error, match=words):
            other.compress(model, ids, "kvzip:25%")
    with detached(model), pytest.raises(UnsupportedError, match=r"call kvkeep\.attach"):
        cache.compress(model, ids, "kvzip:25%")
    assert cache.layers is held
    assert model_goes_on(model, cache)


@contextmanager
def detached(model):
    kvkeep.detach(model)
    try:
        yield
    finally:
        kvkeep.attach(model)


def test_a_reading_that_fails_changes_nothing(model, ids, monkeypatch):
    cache = filled(model, ids)
    held = cache.layers
    calls = []

    def fails(layer, inputs):
        calls.append(layer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Rereading, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        cache.compress(model, ids, "kvzip:25%")
    assert calls
    assert cache.layers is held
    assert cache.length == TOKENS
    monkeypatch.undo()
    assert model_goes_on(model, cache)


@pytest.mark.parametrize(("text", "words"), [
    ("kvzip:0%", "more than 0%"), ("kvzip:101%", "at most 100%"), ("kvzip:25", "a percentage"),
    ("kvzip:x%", "a percentage"), ("kvzip:25%,sinks=0", "at least 1"), ("kvzip", "lacks 'tokens'"),
])  # fmt: skip
def test_bad_specs(text, words):
    with pytest.raises(SpecError, match=words):
        kvkeep.CacheSpec.parse(text)


def test_specs_are_printed_as_they_are_read():
    for text in ("kvzip:25%+plain@growing", "kvzip:12.5%,chunk=1024+int8@growing"):
        assert str(kvkeep.CacheSpec.parse(text)) == text


def test_the_hosts_of_other_libraries_say_what_they_lack():
    host = host_of(tiny_model())
    with pytest.raises(UnsupportedError, match="feed_layers"):
        host.feed_layers(torch.zeros(1), torch.zeros(1), [])


def test_linear_biases_stay(ids):
    """Of the slots that stay, a bias by distance tells the positions apart."""
    model = model_of("bloom").eval()
    kvkeep.attach(model)
    cache, whole = filled(model, ids), filled(model, ids)
    before = [layer.slopes for layer in cache.layers]
    assert all(before)
    cache.compress(model, ids, "kvzip:100%")
    assert [layer.slopes for layer in cache.layers] == before
    with torch.no_grad():
        found, exact = (model(ids[:, :1], past_key_values=x).logits for x in (cache, whole))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
