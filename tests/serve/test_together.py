"""Many answers at once: each is what its request gets alone, and ends alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.held_backend import Held
from support.live_server import asking, client, pieces, refusal, said, serving, small, until
from support.tiny_models import tiny

from kvkeep.serve.engine import Engine
from kvkeep.serve.http import listen
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.completions import CompletionRequest
from kvkeep.store import PrefixStore

LONG = {"model": "tiny", "max_tokens": 4000, "temperature": 0, "stream": True}


@pytest.fixture
def endless():
    """A model that never ends an answer."""
    model = small()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kind", ["llama", "latent"])
def test_streams_at_once_are_those_of_a_server_without_load(tokenizer, kind):
    model = small() if kind == "llama" else tiny("deepseek-v3", vocab_size=49152)
    texts = [f"Question {index}? " + "Why? " * index for index in range(6)]
    with serving(model, tokenizer) as (engine, talk), ThreadPoolExecutor() as threads:

        def ask(text):
            options = {"max_tokens": 24, "temperature": 0, "stream": True}
            found = talk.chat.completions.create(model="tiny", messages=asking(text), **options)
            return "".join(pieces(found)[0])

        alone = [ask(text) for text in texts]
        most = []
        step = engine.batch.step
        engine.batch.step = lambda: most.append(engine.batch.running) or step()
        assert list(threads.map(ask, texts)) == alone
        assert max(most) > 2


def test_who_leaves_frees_its_slots_within_a_step(endless, tokenizer):
    with serving(endless, tokenizer) as (engine, talk):
        stays = talk.completions.create(prompt="A story.", **LONG)
        leaves = talk.completions.create(prompt="Another.", n=2, **LONG)
        for stream in (stays, leaves):
            next(iter(stream))
        until(lambda: engine.batch.running == 3)
        after, left = [], []
        step, cancel = engine.batch.step, engine.cancel

        def stepping():
            found = step()
            after.append(engine.batch.running)
            return found

        engine.batch.step = stepping
        engine.cancel = lambda work: (cancel(work), left.append(len(after)))
        leaves.close()
        until(lambda: left and len(after) > left[0] + 3)
        assert set(after[left[0] + 1 :]) == {1}  # the step that ran then may have had all three
        stays.close()
        until(lambda: not engine.batch.running)
        assert (engine.batch.live_bytes, engine.batch.promised_bytes, engine.waiting) == (0, 0, 0)


def test_an_idle_server_computes_nothing(model, tokenizer):
    with serving(model, tokenizer) as (engine, talk):
        for leave in (False, True):
            stream = talk.completions.create(prompt="Hello.", **LONG | {"max_tokens": 40})
            next(iter(stream))
            stream.close() if leave else list(stream)
            until(lambda: not engine.batch.running)
            clock = time.pthread_getcpuclockid(engine._thread.ident)
            before = time.clock_gettime(clock)
            time.sleep(0.5)
            assert time.clock_gettime(clock) - before < 0.1


def test_a_request_that_cannot_fit_is_refused_and_others_wait_for_memory(endless, tokenizer):
    short = {"model": "tiny", "temperature": 0, "max_tokens": 200}
    limits = Limits(cache_bytes=80_000)  # each token takes 256
    with serving(endless, tokenizer, limits=limits) as (engine, talk), ThreadPoolExecutor() as pool:
        create = talk.completions.create
        error = refusal(lambda: create(prompt="Hello.", **short | {"max_tokens": 1000}))
        assert error["param"] == "max_tokens"
        assert "memory" in error["message"]
        stream = create(prompt="Hello.", stream=True, **short)
        next(iter(stream))
        waiting = pool.submit(create, prompt="Hello.", **short)
        until(lambda: engine.waiting == 1)
        assert engine.batch.running == 1
        text = "".join(chunk.choices[0].text for chunk in stream)
        assert waiting.result().choices[0].text.endswith(text)


def test_what_no_request_is_at_fault_for_fails_all_and_is_over(endless, tokenizer, monkeypatch):
    def broken():
        raise RuntimeError("of kvkeep's own")

    with serving(endless, tokenizer) as (engine, talk):
        stream = talk.completions.create(prompt="A story.", **LONG)
        next(iter(stream))
        monkeypatch.setattr(engine.batch, "step", broken)
        with pytest.raises(openai.APIError, match="its log says why"):
            list(stream)
        answer = talk.completions.create(prompt="Hello.", model="tiny", max_tokens=2)
        assert answer.usage.completion_tokens == 2


def test_a_failed_admission_ends_that_request_only(endless, tokenizer, monkeypatch):
    short = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    with serving(endless, tokenizer) as (engine, talk):
        create = talk.completions.create
        expected = [create(prompt=prompt, **short).choices[0].text for prompt in ("A", "B")]
        stream = create(prompt="A", **LONG)
        given = [next(iter(stream)).choices[0].text]
        begin = engine.batch._preemption.resume

        def fails(answer):
            if answer.params.max_new_tokens == 7:
                raise ValueError("no")
            begin(answer)

        monkeypatch.setattr(engine.batch._preemption, "resume", fails)
        error = refusal(lambda: create(prompt="Hello.", **short | {"max_tokens": 7}), 500)
        assert "its log says why" in error["message"]
        assert create(prompt="B", **short).choices[0].text == expected[1]
        given += [next(iter(stream)).choices[0].text for _ in range(20)]
        assert "".join(given).startswith(expected[0])
        stream.close()  # or the server would wait for it


def test_a_request_waits_for_its_store_alone(endless, tokenizer):
    short = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    text, backend = "The keeper counts the ships. " * 9, Held()
    with serving(endless, tokenizer, store=PrefixStore(backend=backend)) as (engine, talk):
        expected = talk.completions.create(prompt=text, **short)
        engine.store.flush()
    store = PrefixStore(backend=backend)
    with serving(endless, tokenizer, store=store) as (engine, talk), ThreadPoolExecutor() as pool:
        create = talk.completions.create
        stream = create(prompt="A story.", **LONG)
        next(iter(stream))
        until(lambda: not backend.asked.clear() and engine.batch.running == 1)
        backend.reads.clear()
        backend.writes.clear()
        waits = pool.submit(create, prompt=text, **short)
        assert backend.asked.wait(60)
        for _ in range(20):
            next(iter(stream))
        stream.close()
        until(lambda: not engine.batch.running)  # what was said is learned meanwhile
        assert engine.waiting == 1
        backend.let()
        answer = waits.result()
        assert answer.choices[0].text == expected.choices[0].text
        found = answer.usage.prompt_tokens_details.cached_tokens
        assert found == len(tokenizer(text).input_ids) - 1


def test_an_error_in_telling_one_answer_ends_that_request_only(endless, tokenizer, monkeypatch):
    with serving(endless, tokenizer) as (engine, talk):
        stream = talk.completions.create(prompt="A story.", **LONG)
        next(iter(stream))
        monkeypatch.setattr(engine, "_names", [])
        with pytest.raises(openai.APIError, match="its log says why"):
            list(talk.completions.create(prompt="Another.", logprobs=2, **LONG))
        until(lambda: engine.batch.running == 1)
        next(iter(stream))
        stream.close()


def test_a_server_that_stops_under_load_finishes_or_tells(endless, tokenizer, monkeypatch):
    monkeypatch.setattr(listen, "_GRACE_S", 1.0)
    limits = Limits(sequences=3)
    prompts = [f"Story {index}: " + "once " * 40 for index in range(6)]
    with serving(endless, tokenizer, limits=limits) as (engine, talk), ThreadPoolExecutor() as pool:
        store = engine.store
        create = talk.completions.create
        short = {"model": "tiny", "temperature": 0, "max_tokens": 12}
        expected = [create(prompt=prompt, **short).choices[0].text for prompt in prompts]
        streams = [create(prompt=prompt, **LONG) for prompt in prompts[:2]]
        heads = [next(iter(stream)).choices[0].text for stream in streams]
        finishes = create(prompt=prompts[2], **LONG | {"max_tokens": 60})
        next(iter(finishes))
        waiting = [pool.submit(create, prompt=prompt, **LONG) for prompt in prompts[3:]]
        until(lambda: engine.waiting == 3)
        engine.server.should_exit = True
        assert len(list(finishes)) > 3
        for stream, head, text in zip(streams, heads, expected, strict=False):
            given = [head]
            with pytest.raises(openai.APIError, match="shutting down"):
                given.extend(chunk.choices[0].text for chunk in stream)
            assert "".join(given).startswith(text)
        for one in waiting:  # one is let in when another has finished
            with pytest.raises(openai.APIError, match="shutting down"):
                list(one.result())
        until(lambda: not engine._thread.is_alive())
    store.check()
    with serving(endless, tokenizer, store=store) as (_, talk):
        for prompt, text in zip(prompts, expected, strict=True):
            answer = talk.completions.create(prompt=prompt, **short)
            assert answer.choices[0].text == text
            assert answer.usage.prompt_tokens_details.cached_tokens > 40


def test_a_request_after_the_end_is_told_so(model, tokenizer):
    engine = Engine(model, tokenizer, name="tiny")
    request = read(b'{"model": "tiny", "prompt": [5]}', CompletionRequest)
    encoded = engine.prompts.encode(request)
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit(encoded.prompts, print)


def test_names_take_turns_though_one_asks_for_many_answers(endless, tokenizer):
    keys = Keys({"a": "ada", "b": "bob"})
    options = {"limits": Limits(sequences=2), "keys": keys, "key": "a"}
    with serving(endless, tokenizer, **options) as (engine, ada), ThreadPoolExecutor() as threads:
        bob = client(str(ada.base_url), "b")
        ended = []

        def ask(talk, name, **options):
            options = {"model": "tiny", "messages": asking("Hello."), "temperature": 0} | options
            text = said(talk.chat.completions.create(**options))
            ended.append(name)
            return text

        many = threads.submit(ask, ada, "ada", n=8, max_tokens=40)
        until(lambda: engine.batch.running == 2)
        few = threads.submit(ask, bob, "bob", max_tokens=40)
        assert few.result() == many.result()
        assert ended == ["bob", "ada"]
