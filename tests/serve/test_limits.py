"""What a request may take, and how many wait for their turn."""

from __future__ import annotations

import gc
import json
import math
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx2
import openai
import pytest
from support.live_server import CONTEXT, JSON, asking, client, refusal, said, serving, until

from kvkeep.errors import SpecError
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.completions import CompletionRequest

SHORT = {"model": "tiny", "max_tokens": 2, "temperature": 0}


@contextmanager
def busy(model, tokenizer, limits=None, **options):
    """A server of one answer at a time, which answers somebody at length: its engine, a client, and
    what ends the answer."""
    model.generation_config.eos_token_id = None
    limits = replace(limits or Limits(), sequences=1)
    with (
        serving(model, tokenizer, limits=limits, **options) as (engine, talk),
        ThreadPoolExecutor() as threads,
    ):
        stream = talk.completions.create(
            model="tiny", prompt="A long story.", max_tokens=4000, stream=True
        )
        next(iter(stream))
        try:
            yield engine, talk, stream.close, threads
        finally:
            stream.close()


def test_more_than_may_wait_are_sent_away_at_once(model, tokenizer):
    with busy(model, tokenizer, limits=Limits(queue=2)) as (engine, talk, end, threads):

        def ask():
            return talk.completions.create(prompt="Hello.", **SHORT)

        waiting = [threads.submit(ask) for _ in range(2)]
        until(lambda: engine.waiting == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests wait") as caught:
            ask()
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) > 0
        end()
        texts = {one.result().choices[0].text for one in waiting}
        assert texts == {ask().choices[0].text}


def test_who_waits_too_long_is_told_so(model, tokenizer):
    with busy(model, tokenizer, limits=Limits(wait_s=0.2)) as (engine, talk, end, _):
        for stream in (False, True):  # before an answer begins, so its status can tell
            with pytest.raises(openai.InternalServerError, match=r"0\.2 s") as caught:
                talk.completions.create(prompt="Hello.", stream=stream, **SHORT)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) > 0
        assert engine.waiting == 0
        end()
        assert talk.completions.create(prompt="Hello.", **SHORT).usage.completion_tokens == 2


def test_who_asks_much_keeps_nobody_of_another_name_waiting(model, tokenizer):
    keys = Keys({"a": "ada", "b": "bob"})
    options = {"limits": Limits(queue=3), "keys": keys, "key": "a"}
    with busy(model, tokenizer, **options) as (engine, ada, end, threads):
        order = []

        def ask(talk, name):
            talk.completions.create(prompt="Hello.", **SHORT)
            order.append(name)

        asked = []
        for count in range(1, 4):
            asked.append(threads.submit(ask, ada, "ada"))
            until(lambda count=count: engine.waiting == count)
        with pytest.raises(openai.RateLimitError):
            ask(ada, "ada")
        asked.append(threads.submit(ask, client(str(ada.base_url), "b"), "bob"))
        until(lambda: engine.waiting == 4)
        end()
        for one in asked:
            one.result()
        assert order.index("bob") < 2
        assert order.count("ada") == 3


def test_who_leaves_the_queue_leaves_nothing_behind(model, tokenizer):
    with busy(model, tokenizer) as (engine, talk, end, threads):
        impatient = talk.with_options(timeout=1.0)
        prompt = "word " * 4000

        def leave(stream):
            with pytest.raises(openai.APITimeoutError):
                impatient.completions.create(prompt=prompt, stream=stream, **SHORT)

        def asked():
            return [one for one in gc.get_objects() if type(one) is CompletionRequest]

        gc.collect()  # requests of earlier tests
        left = [threads.submit(leave, bool(i % 2)) for i in range(6)]
        until(lambda: engine.waiting == 6)
        until(lambda: len(asked()) == 7)
        assert not any(one.prompt for one in asked())  # the tokens are enough
        for one in left:
            one.result()
        until(lambda: engine.waiting == 0)
        until(lambda: gc.collect() >= 0 and len(asked()) == 1)  # those who left may take a moment
        end()
        assert talk.completions.create(prompt="Hello.", **SHORT).usage.completion_tokens == 2


@contextmanager
def slow_to_read(monkeypatch):
    """Nothing is parsed until it is let go: the bodies that were begun, and what lets go."""
    begun, go_on = [], threading.Event()

    def waiting(body, kind):
        begun.append(json.loads(body)["prompt"][:3])
        assert go_on.wait(60)
        return read(body, kind)

    monkeypatch.setattr("kvkeep.serve.app.read", waiting)
    try:
        yield begun, go_on.set
    finally:
        go_on.set()


def test_bodies_of_clients_who_left_are_not_kept(model, tokenizer, monkeypatch):
    limits = Limits(queue=2, prompt_bytes=2**20)
    with (
        slow_to_read(monkeypatch) as (begun, go_on),
        serving(model, tokenizer, limits=limits) as (engine, talk),
        ThreadPoolExecutor() as threads,
    ):
        first = threads.submit(talk.completions.create, prompt="Hello.", **SHORT)
        until(lambda: begun)
        address = (talk.base_url.host, talk.base_url.port)
        body = json.dumps({"prompt": "a" * 2**20, **SHORT}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        tracemalloc.start()
        try:
            for _ in range(12):
                with socket.create_connection(address) as leaving:
                    leaving.sendall(head + body)
                    until(lambda: engine.admission.unparsed == 2)
                until(lambda: engine.admission.unparsed == 1)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held < 4 * 2**20
        go_on()
        assert first.result().usage.completion_tokens == 2
        assert len(begun) == 1


def test_who_sends_much_keeps_nobody_of_another_name_from_being_read(model, tokenizer, monkeypatch):
    keys = Keys({"a": "ada", "b": "bob"})
    with (
        slow_to_read(monkeypatch) as (begun, go_on),
        serving(model, tokenizer, keys=keys, key="a") as (engine, ada),
        ThreadPoolExecutor() as threads,
    ):
        bob = client(str(ada.base_url), "b")
        asked = [threads.submit(ada.completions.create, prompt="ada", **SHORT)]
        until(lambda: begun)
        for waiting, (talk, name) in enumerate([(ada, "ada")] * 3 + [(bob, "bob")], 1):
            asked.append(threads.submit(talk.completions.create, prompt=name, **SHORT))
            until(lambda waiting=waiting: engine.admission.unparsed == waiting + 1)
        go_on()
        for one in asked:
            one.result()
        assert begun.index("bob") <= 2
        assert begun.count("ada") == 4


def test_the_wait_to_be_read_counts(model, tokenizer, monkeypatch):
    limits = Limits(wait_s=0.2)
    with (
        slow_to_read(monkeypatch) as (begun, go_on),
        serving(model, tokenizer, limits=limits) as (_, talk),
        ThreadPoolExecutor() as threads,
    ):
        first = threads.submit(talk.completions.create, prompt="Hello.", **SHORT)
        until(lambda: begun)
        with pytest.raises(openai.InternalServerError, match=r"0\.2 s") as caught:
            talk.completions.create(prompt="Hello.", **SHORT)
        assert caught.value.status_code == 503
        go_on()
        assert first.result().usage.completion_tokens == 2


def test_who_leaves_while_the_model_computes_keeps_nobody_waiting(model, tokenizer):
    go_on = threading.Event()

    def wait(*_):
        assert go_on.wait(60)

    model.model.layers[0].register_forward_pre_hook(wait)
    with serving(model, tokenizer) as (engine, talk), ThreadPoolExecutor() as threads:
        with pytest.raises(openai.APITimeoutError):
            talk.with_options(timeout=0.3).completions.create(prompt="Hello.", **SHORT)
        waiting = [
            threads.submit(talk.completions.create, prompt="Hello.", **SHORT) for _ in range(2)
        ]
        until(lambda: engine.waiting == 2)
        go_on.set()
        assert len({one.result().choices[0].text for one in waiting}) == 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 21}, "max_tokens"),
        ({"n": 2, "max_tokens": 11}, "n"),
        ({"n": 21}, "n"),
    ],
)
def test_tokens_of_all_answers_are_limited(limited, options, param):
    create = limited.completions.create
    error = refusal(lambda: create(model="tiny", prompt="Hello.", **options))
    assert error["param"] == param
    assert "a request may have 20" in error["message"]


@pytest.fixture(scope="module")
def limited(tokenizer):
    from support.live_server import small

    model = small()
    model.generation_config.eos_token_id = None
    with serving(model, tokenizer, limits=Limits(answer_tokens=20, prompt_bytes=500)) as (_, talk):
        yield talk


def test_without_a_number_answers_are_as_long_as_all_may_be(limited):
    options = {"model": "tiny", "temperature": 0}
    create = limited.chat.completions.create
    messages = [{"role": "user", "content": "Hello."}]
    assert create(messages=messages, **options).usage.completion_tokens == 20
    assert create(messages=messages, n=3, **options).usage.completion_tokens == 18
    assert create(messages=messages, n=4, max_tokens=5, **options).usage.completion_tokens == 20


@pytest.mark.parametrize("digits", [20, 4300])
def test_numbers_too_long_to_be_written_are_refused(served, digits, monkeypatch):
    monkeypatch.setattr(served[0].prompts, "context", None)
    create = served[1].completions.create
    error = refusal(
        lambda: create(model="tiny", prompt="Hi.", n=128, max_tokens=10**digits - 1, temperature=0)
    )
    assert error["param"] == "max_tokens"


def test_the_context_bounds_an_answer_before_the_limit_does(served):
    answer = served[1].completions.create(
        model="tiny", prompt=[5] * (CONTEXT - 3), max_tokens=10**9, n=2, temperature=0
    )
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "a" * 501},
        {"prompt": "é" * 251},
        {"messages": asking("a" * 500)},
        {"messages": [{"role": "user", "content": ""}] * 200},
    ],
)
def test_prompts_are_measured_before_they_are_tokenised(limited, options, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.__call__", None)
    path = "completions" if "prompt" in options else "chat/completions"
    body = {"model": "tiny", **options}
    answer = httpx2.post(f"{limited.base_url}{path}", json=body, trust_env=False)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length: more than 500 bytes" in error["message"]


def test_what_a_template_would_blow_up_is_not_rendered(served, monkeypatch):
    template = "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served[0].tokenizer, "chat_template", template)
    rendered = []
    monkeypatch.setattr(
        served[0].tokenizer, "apply_chat_template", lambda *_, **__: rendered.append(1)
    )
    tool = {"type": "function", "function": {"name": "f", "x": 0}}
    body = json.dumps({"model": "tiny", "messages": asking("Hello."), "tools": [tool] * 40})
    body = body.replace('"x": 0', f'"x": {"[" * 200 + "]" * 200}')
    assert len(body) < served[0].prompts.most_bytes  # 6 MB, indented
    url = f"{served[1].base_url}chat/completions"
    answer = httpx2.post(url, content=body, headers=JSON, trust_env=False)
    assert answer.status_code == 400
    assert "bytes" in answer.json()["error"]["message"]
    assert not rendered


def test_limits_that_let_nothing_through():
    for wrong in (
        {"queue": -1},
        {"wait_s": 0},
        {"wait_s": math.nan},
        {"answer_tokens": 0},
        {"timeout_s": math.inf},
    ):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            Limits(**wrong)
    assert Limits(queue=0).queue == 0


def test_a_server_without_a_queue_answers_one_at_a_time(model, tokenizer):
    with busy(model, tokenizer, limits=Limits(queue=0)) as (_, talk, end, _):
        with pytest.raises(openai.RateLimitError):
            talk.completions.create(prompt="Hello.", **SHORT)
        end()

        def answered():
            try:
                return said(talk.chat.completions.create(messages=asking("Hello."), **SHORT))
            except openai.RateLimitError:
                return None

        until(answered)
