"""Batch: answers are what each prompt gets alone, whoever else comes and goes."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.printable import Printable
from support.tiny_host import tiny_model
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import (
    CapacityError,
    OutOfMemoryError,
    ShapeError,
    SpecError,
    UnsupportedError,
)
from kvkeep.files.offload import Offload
from kvkeep.generate import Batch, Reuse, SamplingParams, generate_many, stream
from kvkeep.generate.sampling import bias, penalty
from kvkeep.host import host_of
from kvkeep.host.cache import bytes_of
from kvkeep.layer.layer import LayerCache

SPECS = ("keep_all", "window:9,sinks=1", "h2o:10", "keep_all+int8", "keep_all+kivi:4,together=4")
VOCABULARY = 96  # of the model


def warm(most, **more):
    """Sampled, by every number."""
    numbers = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    return SamplingParams(most, **numbers, **more)


def tokens(n, seed=0):
    return torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(seed))


def alone(model, prompt, params, **options):
    """The tokens of each answer to one prompt, in a batch of its own."""
    (answers,) = generate_many(model, [prompt], params, progress=False, **options)
    return [answer.tokens for answer in answers]


def test_an_answer_is_what_forwards_of_one_sequence_give(model):
    host, prompt = host_of(model), tokens(7)
    with torch.inference_mode():
        cache, expected, logprobs = host.new_cache(), [], []
        row = prompt[None]
        for _ in range(5):
            logits = host.forward(row, cache)[0, -1]
            row = logits.argmax()[None, None]
            expected.append(int(row))
            logprobs.append(float(logits.log_softmax(0)[row]))
    (answer,) = Batch(model).add(prompt, SamplingParams(5))
    assert answer.tokens == []
    batch = Batch(model)
    (answer,) = batch.add(prompt, SamplingParams(5, logprobs=True))
    assert list(batch) == [answer]
    assert (answer.tokens, answer.reason, batch.running, batch.waiting) == (
        expected,
        "length",
        0,
        0,
    )
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("spec", ["keep_all", "h2o:10"])
def test_a_prompt_is_scored_by_what_its_chunks_saw(model, spec):
    host, prompt, store = host_of(model), tokens(21), kvkeep.PrefixStore()
    with torch.inference_mode():
        cache = host.new_cache(spec)
        rows = [host.forward(chunk[None], cache, last=len(chunk))[0] for chunk in prompt.split(8)]
    logprobs = torch.cat(rows).log_softmax(-1)[:-1]
    batch = Batch(model, spec=spec, chunk=8, store=store)
    batch.add(prompt, SamplingParams(2))
    list(batch)  # the store has it, and does not spare the computation
    asked = SamplingParams(2, prompt_logprobs=True, top_logprobs=3)
    answers = batch.add(prompt, asked, n=2)
    other = batch.add(tokens(5, 1), SamplingParams(8))
    list(batch)
    assert other[0].tokens == alone(model, tokens(5, 1), SamplingParams(8), spec=spec)[0]
    for answer in answers:
        scores = answer.origin.scores
        own = logprobs.gather(1, prompt[1:, None])[:, 0].tolist()
        assert [score.logprob for score in scores] == pytest.approx(own, abs=1e-4)
        top = logprobs.topk(3)
        for score, ids, values in zip(scores, top.indices, top.values, strict=True):
            assert [one.token for one in score.top] == ids.tolist()
            assert [one.logprob for one in score.top] == pytest.approx(values.tolist(), abs=1e-4)
    given = host.new_cache()
    with torch.inference_mode():
        host.forward(prompt[None, :4], given)
    with pytest.raises(UnsupportedError, match="prompt_logprobs with a cache that already holds"):
        list(stream(model, prompt, asked, cache=given))


def test_each_answer_has_processors_of_its_own(model):
    def following():
        seen = []

        def process(ids, logits):
            seen.append(ids.shape[1])
            assert seen == [7 + at for at in range(len(seen))]
            return logits.index_fill(1, torch.tensor([3 + len(seen)]), 1e4)

        return process

    found = alone(model, tokens(7), SamplingParams(3, own_processors=[following]), n=2)
    assert found == [[4, 5, 6]] * 2


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(x, marks=pytest.mark.slow) for x in (3, 4))])
def test_answers_do_not_depend_on_company(model, seed):
    """Random arrivals, lengths, specs, priorities, cancels, and too little memory for all."""
    rng = random.Random(seed)
    cases = []
    for i in range(12):
        sampled = warm if rng.random() < 0.5 else SamplingParams
        most, priority = rng.randint(1, 12), rng.choice((0, 0, 1, 2))
        params = sampled(most, top_logprobs=VOCABULARY, priority=priority)
        cases.append(
            (tokens(rng.randint(1, 40), i), params, rng.choice(SPECS), rng.choice((1, 1, 3)))
        )
    host = host_of(model)
    most = bytes_of(host.new_cache(), host.geometries(), 60)
    batch = Batch(model, max_bytes=most, chunk=8, step_tokens=rng.choice((8, 16, 64)))
    left, found, preempted = list(cases), [], 0
    cancelled = rng.sample(range(12), 2)
    while left or batch.running or batch.waiting:
        for _ in range(min(len(left), rng.randint(0, 2))):
            prompt, params, spec, n = left.pop(0)
            found.append(batch.add(prompt, params, n=n, spec=spec))
            if len(found) - 1 in cancelled:
                found[-1][0].cancel()
        batch.step()
        assert batch.promised_bytes <= most
        preempted += sum(answer.preempted is not None for answers in found for answer in answers)
    for i, (answers, (prompt, params, spec, n)) in enumerate(zip(found, cases, strict=True)):
        options = {"n": n, "spec": spec, "chunk": 8, "progress": False}
        (expected,) = generate_many(model, [prompt], params, **options)
        for answer, own in zip(answers, expected, strict=True):
            if i in cancelled and answer.index == 0:
                assert (answer.reason, answer.tokens) == ("cancelled", [])
                continue
            assert answer.tokens == own.tokens
            for mine, theirs in zip(answer.top_logprobs, own.top_logprobs, strict=True):
                assert dict(mine) == pytest.approx(dict(theirs), abs=1e-4)
    assert preempted


@pytest.mark.parametrize("host_bytes", [None, 0])
def test_preempted_answers_resume_exactly(model, host_bytes, tmp_path):
    host = host_of(model)
    most = bytes_of(host.new_cache(), host.geometries(), 30)
    offload = None if host_bytes is None else Offload(host_bytes, str(tmp_path))
    batch = Batch(model, max_bytes=most, offload=offload)
    (first,) = batch.add(tokens(10), warm(20))
    for _ in range(5):
        batch.step()
    (urgent,) = batch.add(tokens(12, 1), SamplingParams(8, priority=1))
    (equal,) = batch.add(tokens(3, 2), SamplingParams(4))
    batch.step()
    assert (first.cache, batch.running, batch.waiting) == (None, 1, 2)
    assert list(batch) == [urgent, first, equal]
    assert [first.tokens] == alone(model, tokens(10), warm(20))
    if offload is not None:
        assert offload.file_bytes == offload.host_bytes == 0


def test_without_memory_the_youngest_is_preempted(model, monkeypatch):
    batch = Batch(model)
    answers = [batch.add(tokens(6, i), SamplingParams(4))[0] for i in range(3)]
    batch.step()
    forward, sizes = batch._host.forward_packed, []

    def small(pieces):
        sizes.append(len(pieces))
        if len(pieces) > 1:
            raise OutOfMemoryError("no memory")
        return forward(pieces)

    monkeypatch.setattr(batch._host, "forward_packed", small)
    batch.step()
    assert sizes == [3, 2, 1]
    assert [answer.cache is None for answer in answers] == [False, True, True]
    monkeypatch.undo()
    for answer in batch:
        assert [answer.tokens] == alone(model, answer.prompt, SamplingParams(4))


def test_answers_to_one_prompt_share_its_slots(model):
    host = host_of(model)
    batch = Batch(model, chunk=50)
    answers = batch.add(tokens(90), warm(6), n=4)
    batch.add(tokens(5), SamplingParams(20))
    assert batch.promised_bytes == 0
    for _ in range(4):
        batch.step()
    one, both = (bytes_of(host.new_cache(), host.geometries(), n) for n in (89, 96))
    assert batch.promised_bytes <= one + 4 * (both - one) + bytes_of(
        host.new_cache(), host.geometries(), 25
    )
    held = {
        run.planes["k"].data_ptr()
        for answer in answers
        for run in answer.cache.layers[0].slots.frozen.runs
    }
    assert len(held) == 1  # the same memory
    for _ in batch:
        pass
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    assert [a.tokens for a in answers] == alone(model, tokens(90), warm(6), n=4)


def test_a_long_prompt_delays_others_by_a_chunk(model, monkeypatch):
    batch = Batch(model, chunk=16, step_tokens=16)
    (short,) = batch.add(tokens(4), SamplingParams(30))
    batch.step()
    (long,) = batch.add(tokens(80, 1), SamplingParams(2))
    forward, sizes = batch._host.forward_packed, []

    def noted(pieces):
        sizes.append([len(piece.ids) for piece in pieces])
        return forward(pieces)

    monkeypatch.setattr(batch._host, "forward_packed", noted)
    while not long.tokens:
        before = len(short.tokens)
        batch.step()
        assert len(short.tokens) == before + 1
    assert sizes == [[1, 16]] * 5


def test_text_streams_and_stops(model):
    letters = Printable()
    batch = Batch(model, letters)
    (whole,) = batch.add("hello", SamplingParams(12))
    streamed = ""
    while not whole.ended:
        streamed += "".join(new.text for new in batch.step())
    assert streamed == whole.text == letters.decode(whole.tokens, True)
    stop = whole.text[4:7]
    batch = Batch(model, letters)
    (cut,) = batch.add("hello", SamplingParams(12, stop=[stop]))
    (ended,) = batch.add("hello", SamplingParams(12, end_tokens=frozenset(whole.tokens[2:3])))
    list(batch)
    assert (cut.text, cut.reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert (ended.reason, ended.tokens[-1]) == ("stop", whole.tokens[2])


def test_logits_processors_see_the_whole_text(model):
    seen = []

    def only_even(ids, logits):
        seen.append(ids.shape)
        return logits.masked_fill(torch.arange(logits.shape[-1]) % 2 == 1, float("-inf"))

    params = SamplingParams(4, processors=[only_even])
    assert all(token % 2 == 0 for token in alone(model, tokens(5), params)[0])
    assert seen == [(1, n) for n in (5, 6, 7, 8)]


def test_penalties_and_biases():
    logits = torch.zeros(1, 6)
    ids = torch.tensor([[5, 5, 5, 1, 2, 2]])  # of which three are the prompt's
    found = penalty(3, presence=0.5, frequency=0.25)(ids, logits)
    assert found.tolist() == [[0, -0.75, -1, 0, 0, 0]]
    assert bias({4: 2.0, 0: -100})(ids, found).tolist() == [[-100, -0.75, -1, 0, 2, 0]]
    assert not logits.any()


def test_an_error_of_one_answer_ends_that_answer(model):
    def fails(ids, logits):
        raise ValueError("no")

    batch = Batch(model)
    (bad,) = batch.add(tokens(5), SamplingParams(4, processors=[fails]))
    (good,) = batch.add(tokens(6), SamplingParams(4))
    assert list(batch) == [bad, good]
    assert (bad.reason, str(bad.error), good.reason) == ("error", "no", "length")
    assert [good.tokens] == alone(model, tokens(6), SamplingParams(4))
    with pytest.raises(ValueError, match="no"):
        alone(model, tokens(5), bad.params)
    with pytest.raises(ShapeError, match="2 params for 1"):
        alone(model, tokens(5), [SamplingParams(), SamplingParams()])


def test_a_failed_step_ends_only_what_cannot_go_back(model, monkeypatch):
    batch = Batch(model)
    (exact,) = batch.add(tokens(20), SamplingParams(6))
    (evicting,) = batch.add(tokens(20, 1), SamplingParams(6), spec="h2o:8")
    batch.step()
    run, last = LayerCache.run, evicting.cache.layers[1]

    def fails(self, inputs, attend=None):
        if self is last:
            raise OutOfMemoryError("no memory")
        return run(self, inputs, attend)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCache, "run", fails)
        batch.step()
    list(batch)
    assert (evicting.reason, exact.reason) == ("error", "length")
    assert [exact.tokens] == alone(model, tokens(20), SamplingParams(6))


@pytest.mark.parametrize("error", [ValueError("no"), OutOfMemoryError("no memory")])
def test_a_failed_admission_ends_that_answer_only(model, monkeypatch, error):
    batch = Batch(model)
    (first,) = batch.add(tokens(6), SamplingParams(8))
    batch.step()
    bad, good = (batch.add(tokens(5, i), SamplingParams(4))[0] for i in (1, 2))
    new_cache, calls = batch._reuse.new_cache, itertools.count()

    def fails(spec):
        if next(calls) == 0:
            raise error
        return new_cache(spec)

    monkeypatch.setattr(batch._reuse, "new_cache", fails)
    list(batch)
    (late,) = batch.add(tokens(5, 3), SamplingParams(4))
    list(batch)
    if isinstance(error, OutOfMemoryError):  # it waits for the others
        assert not bad.error
        assert [bad.tokens] == alone(model, tokens(5, 1), SamplingParams(4))
    else:
        assert (bad.reason, bad.error, bad.tokens) == ("error", error, [])
    for answer, prompt, most in ((first, tokens(6), 8), (good, tokens(5, 2), 4)):
        assert [answer.tokens] == alone(model, prompt, SamplingParams(most))
    assert [late.tokens] == alone(model, tokens(5, 3), SamplingParams(4))


def test_an_error_of_who_is_told_of_an_end_is_raised_once(model):
    def fails(answer):
        raise ValueError("no")

    batch = Batch(model, on_end=fails)
    (answer,) = batch.add(tokens(5), SamplingParams(1))
    with pytest.raises(ValueError, match="no"):
        batch.step()
    assert list(batch) == [answer]
    assert batch.step() == []


def poisoned(model, token):
    """A model whose forwards fail as tokenizers in Rust do, if a token is among theirs."""

    class Panic(BaseException):
        pass

    def check(module, args, output):
        if (args[0] == token).any():
            raise Panic(token)

    return model.get_input_embeddings().register_forward_hook(check)


def test_a_failed_forward_ends_only_the_answer_that_fails_alone(model):
    prompts = [tokens(5, i) for i in range(3)]
    expected = [alone(model, prompt, SamplingParams(4)) for prompt in prompts]
    batch = Batch(model)
    (bad,) = batch.add([5, 95, 7], SamplingParams(4))
    good = [batch.add(prompt, SamplingParams(4))[0] for prompt in prompts]
    hook = poisoned(model, 95)
    try:
        batch.step()
        assert [len(answer.tokens) for answer in good] == [1, 1, 1]
        list(batch)
    finally:
        hook.remove()
    assert (bad.reason, bad.tokens, str(bad.error)) == ("error", [], "95")
    assert [[answer.tokens] for answer in good] == expected
    assert not batch._suspects


@pytest.mark.parametrize("kind", ["unattached", "dynamic"])
def test_models_that_cannot_be_packed_are_computed_one_by_one(kind, monkeypatch):
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    options = {"rope_parameters": rope} if kind == "dynamic" else {}
    # It is not known what a latent takes.
    other = tiny("deepseek-v3" if kind == "unattached" else "llama", **options)
    if kind == "dynamic":
        kvkeep.attach(other)
    prompts = [tokens(n, n) for n in (3, 20, 7)]
    host, expected = host_of(other), []
    with torch.inference_mode():
        for prompt in prompts:
            cache, row, own = host.new_cache(), prompt[None], []
            for _ in range(5):
                row = host.forward(row, cache)[:, -1].argmax(-1, keepdim=True)
                own.append(int(row))
            expected.append(own)
    batch = Batch(other)
    answers = [batch.add(prompt, SamplingParams(5))[0] for prompt in prompts]
    several = batch.add(prompts[1], SamplingParams(5), n=2)
    batch.step()
    assert [len(answer.tokens) for answer in answers] == (
        [1, 0, 0] if kind == "dynamic" else [1, 1, 1]
    )
    list(batch)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.tokens for answer in several] == [expected[1]] * 2
    # One whose forward fails ends alone, and without memory it waits for the others.
    forward, calls = host.forward, []

    def fails(ids, cache, **options):
        calls.append(len(ids[0]))
        if len(ids[0]) == 20:
            raise ValueError("no")
        if len(calls) == 1:
            raise OutOfMemoryError("no memory")
        return forward(ids, cache, **options)

    batch = Batch(other)
    monkeypatch.setattr(batch._host, "forward", fails)
    answers = [batch.add(prompt, SamplingParams(5))[0] for prompt in (prompts[0], *prompts)]
    list(batch)
    reasons = [answer.reason for answer in answers]

    # A preempted answer waits while memory is short, though its size is not known.
    def starves(ids, cache, **options):
        if batch.running > 1:
            raise OutOfMemoryError("no memory")
        return forward(ids, cache, **options)

    batch = Batch(other)
    monkeypatch.setattr(batch._host, "forward", starves)
    again = [batch.add(prompt, SamplingParams(5))[0] for prompt in prompts]
    for _ in range(60):
        batch.step()
    assert [answer.tokens for answer in again] == expected
    if kind == "dynamic":  # alone, so no answer can be preempted
        assert reasons == ["error", "length", "error", "length"]
    else:
        assert reasons == ["length", "length", "error", "length"]
    assert [answers[i].tokens for i in (1, 3)] == [expected[0], expected[2]]


def test_queues_are_admitted_and_read_in_turn(model):
    batch = Batch(model, sequences=2, chunk=8, step_tokens=8)
    first = [batch.add(tokens(24, i), SamplingParams(2), queue="much")[0] for i in range(5)]
    (other,) = batch.add(tokens(24, 9), SamplingParams(2), queue="little")
    batch.step()
    assert (batch.running, batch.waiting) == (2, 4)
    assert other.cache is not None  # the second of two
    assert next(answer for answer in batch if answer is not first[0]) is other
    batch = Batch(model, sequences=4, chunk=8, step_tokens=8)
    much = [batch.add(tokens(24, i), SamplingParams(2), queue="much")[0] for i in range(3)]
    (little,) = batch.add(tokens(24, 9), SamplingParams(2), queue="little")
    while not little.tokens:
        batch.step()
    assert [bool(answer.tokens) for answer in much] == [True, False, False]
    # One who came when others had been admitted reads in turn with them all the same.
    batch = Batch(model, chunk=8, step_tokens=9)
    (generating,) = batch.add(tokens(4), SamplingParams(40), queue="much")
    much = [batch.add(tokens(24, i), SamplingParams(2), queue="much")[0] for i in range(3)]
    batch.step()
    (little,) = batch.add(tokens(24, 9), SamplingParams(2), queue="little")
    while not little.tokens:
        batch.step()
    assert not any(answer.tokens for answer in much)
    assert not generating.ended


def test_what_is_likeliest_is_recorded(model):
    sampled = {"temperature": 1.0, "seed": 3}
    batch = Batch(model)
    (answer,) = batch.add(tokens(7), SamplingParams(4, **sampled, logprobs=True, top_logprobs=3))
    (plain,) = batch.add(tokens(7), SamplingParams(4, **sampled))
    list(batch)
    host = host_of(model)
    with torch.inference_mode():
        logits = host.forward(answer.ids[None, :-1], host.new_cache(), last=4)[0]
    best = logits.log_softmax(-1).topk(3)
    for i, top in enumerate(answer.top_logprobs):
        assert [one.token for one in top] == best.indices[i].tolist()
        assert [one.logprob for one in top] == pytest.approx(best.values[i].tolist(), abs=1e-4)
    own = logits.log_softmax(-1)[range(4), answer.tokens]
    assert answer.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert (plain.tokens, plain.logprobs, plain.top_logprobs) == (answer.tokens, [], [])


def test_a_prompt_is_found_while_the_answer_to_it_goes_on(model):
    batch = Batch(model, store=kvkeep.PrefixStore(), chunk=16, step_tokens=16)
    (first,) = batch.add(tokens(30), SamplingParams(20))
    (same,) = batch.add(tokens(30), SamplingParams(20))
    (stranger,) = batch.add(tokens(30), SamplingParams(20), namespace="other")
    private = batch.add(tokens(30), SamplingParams(20), namespace=None, n=2)
    found = batch.add(tokens(30), SamplingParams(20), n=2)
    list(batch)
    assert [answer.cached for answer in (first, same, stranger)] == [0, 29, 0]
    assert [answer.cached for answer in (*private, *found)] == [0, 0, 29, 0]
    assert {tuple(answer.tokens) for answer in (first, same, stranger, *private, *found)} == {
        tuple(first.tokens)
    }
    namespaced = Batch(model, store=batch._reuse._store)
    (again,) = namespaced.add(tokens(30), SamplingParams(1), namespace="other")
    list(namespaced)
    assert again.cached == 29


def test_a_prompt_with_a_store_of_its_own(model):
    batch = Batch(model, store=kvkeep.PrefixStore())
    reuse = Reuse(model, kvkeep.PrefixStore())
    for given, found in ((reuse, 0), (None, 0), (reuse, 29), (None, 29)):
        (answer,) = batch.add(tokens(30), SamplingParams(1), reuse=given)
        list(batch)
        assert answer.cached == found


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(model, length, n):
    store = kvkeep.PrefixStore()
    expected = alone(model, tokens(length), SamplingParams(4))
    for _ in range(2):
        assert alone(model, tokens(length), SamplingParams(4), n=n, store=store) == expected * n


@pytest.mark.parametrize("error", [RuntimeError("broken"), SpecError("odd")])
def test_a_store_that_fails_costs_nobody_an_answer(model, error, monkeypatch):
    def fails(*_, **__):
        raise error

    for method in ("find", "learn"):
        store = kvkeep.PrefixStore()
        monkeypatch.setattr(store, method, fails)
        batch = Batch(model, store=store)
        (answer,) = batch.add(tokens(30), SamplingParams(6))
        list(batch)
        assert [answer.tokens] == alone(model, tokens(30), SamplingParams(6))


@pytest.mark.parametrize("spec", ["keep_all", "h2o:6"])
def test_siblings_that_are_cancelled_change_nothing(model, spec):
    expected = alone(model, tokens(30), warm(5), n=3, spec=spec, chunk=8)
    for moment in (0, 2, 5):
        batch = Batch(model, chunk=8, spec=spec)
        answers = batch.add(tokens(30), warm(5), n=3)
        for _ in range(moment):
            batch.step()
        answers[0].cancel()
        answers[2].cancel()
        list(batch)
        assert answers[1].tokens == expected[1]
        assert answers[0].origin.frozen is None


def test_a_store_is_asked_and_learns(model):
    store = kvkeep.PrefixStore()
    expected = alone(model, tokens(30), SamplingParams(6))
    for cached in (0, 29):
        batch = Batch(model, store=store)
        (answer,) = batch.add(tokens(30), SamplingParams(6))
        list(batch)
        assert (answer.tokens, answer.cached) == (expected[0], cached)
    longer = torch.cat([tokens(30), torch.tensor(expected[0]), tokens(5, 3)])
    batch = Batch(model, store=store)
    (answer,) = batch.add(longer, SamplingParams(3))
    (evicting,) = batch.add(longer, SamplingParams(3), spec="h2o:8")
    list(batch)
    assert (answer.cached, evicting.cached) == (35, 0)
    assert [answer.tokens] == alone(model, longer, SamplingParams(3))


def test_threads_add_and_cancel_while_one_steps(model):
    batch, done = Batch(model), []

    def add(i):
        (answer,) = batch.add(tokens(5 + i, i), SamplingParams(10))
        if i % 3 == 0:
            answer.cancel()
        return answer

    with ThreadPoolExecutor(4) as pool:
        added = [pool.submit(add, i) for i in range(20)]
        while not all(one.done() for one in added) or batch.running or batch.waiting:
            batch.step()
        done = [one.result() for one in added]
    for i, answer in enumerate(done):
        if answer.reason != "cancelled":
            assert [answer.tokens] == alone(model, tokens(5 + i, i), SamplingParams(10))


def test_any_host_that_packs():
    model = tiny_model()
    batch = Batch(model)
    answers = [batch.add(tokens(n, n) % 61, SamplingParams(5))[0] for n in (3, 9, 20)]
    list(batch)
    for answer in answers:
        assert [answer.tokens] == alone(model, answer.prompt, SamplingParams(5))


def test_refused_before_anything_is_changed(model):
    for option in ("step_tokens", "sequences"):
        with pytest.raises(SpecError, match=f"{option} is 0"):
            Batch(model, **{option: 0})
    batch = Batch(model, max_bytes=5000)
    for given, error, message in (
        (([],), ShapeError, "0 tokens"),
        (("text",), ShapeError, "no tokenizer"),
        (([3, 500],), ShapeError, "vocabulary has 0 to 95"),
        ((tokens(100), SamplingParams(100)), ShapeError, "context of 128"),
        ((tokens(100), SamplingParams(20)), CapacityError, "may hold 5000"),
    ):
        with pytest.raises(error, match=message):
            batch.add(*given)
    with pytest.raises(ShapeError, match="n is 0"):
        batch.add(tokens(3), n=0)
    with pytest.raises(CapacityError, match="storage holds 8"):
        batch.add(tokens(6), SamplingParams(4), spec="keep_all@fixed:8")
    for wrong in ({"top_p": 1.5}, {"temperature": -1}, {"min_p": 2}, {"top_k": -1}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            SamplingParams(**wrong)
    with pytest.raises(SpecError, match="top_logprobs is -1"):
        SamplingParams(top_logprobs=-1)
    with pytest.raises(SpecError, match="list of strings"):
        SamplingParams(stop="end")
    assert batch.step() == []


@pytest.mark.parametrize("name", ["put", "get"])
def test_no_memory_to_preempt_or_resume_an_answer(model, monkeypatch, name):
    expected = [alone(model, tokens(9, i), SamplingParams(30))[0] for i in range(3)]
    real, calls = getattr(Offload, name), itertools.count()

    def fails(offload, x):
        if next(calls) == 3:
            raise OutOfMemoryError("no memory")
        return real(offload, x)

    monkeypatch.setattr(Offload, name, fails)
    batch = Batch(model, sequences=2)
    first, low = (batch.add(tokens(9, i), SamplingParams(30))[0] for i in range(2))
    for _ in range(4):
        batch.step()
    (high,) = batch.add(tokens(9, 2), SamplingParams(3, priority=1))
    list(batch)
    assert next(calls) > 3
    assert (first.tokens, high.tokens) == (expected[0], expected[2][:3])
    if name == "put":
        assert isinstance(low.error, OutOfMemoryError)
        assert batch._preemption.offload.host_bytes == 0
    else:
        assert low.tokens == expected[1]


def test_ended_answers_are_shown_with_what_they_hold(model):
    held = []

    def ended(answer):
        held.append((answer.order, answer.reason, answer.cache and answer.cache.fed))

    batch = Batch(model, on_end=ended, sequences=2)
    params = SamplingParams(max_new_tokens=3, end_tokens=frozenset())
    first, second, third = (batch.add(tokens(5, seed), params)[0] for seed in range(3))
    batch.step()
    second.cancel()
    third.cancel()
    list(batch)
    assert sorted(held) == [(0, "length", 7), (1, "cancelled", 5), (2, "cancelled", None)]
    assert first.cache is None


@pytest.mark.parametrize("spec", ["h2o:10", "snapkv:10,window=4"])
def test_an_answer_with_a_budget_is_that_of_generate_for_equal_chunks(model, spec):
    prompt = tokens(21, 5)
    found = model.generate(
        prompt[None],
        past_key_values=kvkeep.Cache(model, spec),
        prefill_chunk_size=8,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    (answer,) = alone(model, prompt, SamplingParams(12), spec=spec, chunk=8)
    assert answer == found[0, 21:].tolist()
