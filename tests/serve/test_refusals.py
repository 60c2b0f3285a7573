"""What the server refuses, and who leaves it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from support.live_server import CONTEXT, JSON, asking, pieces, refusal, said, serving, until

from kvkeep.serve.limits import Limits
from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies import reply


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b" * 1001]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello."}, "messages"),
        ({"messages": ["Hello."]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"model": None}, "model"),
    ],
)
def test_what_is_wrong_is_named(served, options, param):
    given = {"model": "tiny", "messages": asking("Hello.")} | options
    url = str(served[1].base_url)
    answer = httpx2.post(f"{url}chat/completions", json=given, trust_env=False)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1, "b"]]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 129, "n": 2}, "prompt"),
        ({"prompt": [[5] * 3000] * 22, "echo": True}, "prompt"),
        ({"prompt": [10**12], "echo": True}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [49152]}}, "stop_token_ids"),
    ],
)
def test_what_is_wrong_with_completions_is_named(served, options, param):
    error = refusal(lambda: served[1].completions.create(model="tiny", **options))
    assert error["param"] == param


def test_bodies_that_are_no_requests(served):
    url = f"{served[1].base_url}chat/completions"
    bodies = [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 10**5, b"\x00", b"1" * 5000]
    bodies += [b'{"seed": NaN}', b'{"top_p": -Infinity}', b'{"n": 1, "seed": 2, "n": 1}']
    for body in bodies:
        answer = httpx2.post(url, content=body, headers=JSON, trust_env=False)
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"]
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = httpx2.post(url, content=body, headers=JSON, trust_env=False)
    assert "unicode" in answer.json()["error"]["message"]


def test_an_error_may_tell_of_text_that_is_no_unicode(served, monkeypatch):
    template = "{{ tools }}{{ raise_exception(tools[0].function.name) }}"
    monkeypatch.setattr(served[0].tokenizer, "chat_template", template)
    body = (
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [{"function":'
    )
    body += b' {"name": "\\ud800"}}]}'
    url = f"{served[1].base_url}chat/completions"
    answer = httpx2.post(url, content=body, headers=JSON, trust_env=False)
    assert answer.status_code == 400
    assert b"no \\ud800" in reply.refusal(RequestError("no \ud800")).body


def test_a_missing_chat_template_has_a_code(served, monkeypatch):
    monkeypatch.setattr(served[0].tokenizer, "chat_template", None)
    error = refusal(lambda: served[1].chat.completions.create(model="tiny", messages=asking("a")))
    assert (error["code"], error["param"]) == ("no_chat_template", "messages")


def test_paths_and_models(served):
    talk = served[1]
    assert [one.id for one in talk.models.list()] == ["tiny"]
    assert talk.models.retrieve("tiny").owned_by == "kvkeep"
    error = refusal(lambda: talk.models.retrieve("owner/name"), 404)
    assert error["code"] == "model_not_found"
    error = refusal(lambda: talk.completions.create(model="gpt-9", prompt="a"), 404)
    assert error["param"] == "model"
    assert "'tiny'" in error["message"]
    refusal(lambda: talk.embeddings.create(model="tiny", input="a"), 404)
    refusal(lambda: talk.get("/completions", cast_to=str), 405)
    health = httpx2.get(str(talk.base_url).replace("/v1/", "/health"), trust_env=False)
    assert health.json() == {"status": "ok"}


def test_token_ids_and_their_text(served, tokenizer, ask):
    def post(path, **body):
        url = str(served[1].base_url).replace("/v1/", path)
        answer = httpx2.post(url, json=body, headers=JSON, trust_env=False)
        return answer.status_code, answer.json()

    ids = tokenizer("Hello there.").input_ids
    status, found = post("/tokenize", prompt="Hello there.", model="tiny", return_token_strs=True)
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert found["max_model_len"] == CONTEXT
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    status, found = post("/tokenize", messages=asking("Hello."))
    assert found["count"] == ask(max_tokens=1).usage.prompt_tokens
    _, begun = post("/tokenize", messages=asking("Hello."), add_generation_prompt=False)
    assert 0 < begun["count"] < found["count"]
    assert post("/detokenize", tokens=[1, *ids]) == (200, {"prompt": "<|im_start|>Hello there."})
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": asking("a")}, "prompt"),
        ("/tokenize", {"prompt": "a" * 70_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        status, found = post(path, **body)
        assert (status, found["error"]["param"]) == (400, param)
    assert post("/tokenize", prompt="a", model="other")[0] == 404


def test_a_prompt_that_is_too_long(served, ask):
    before = served[0].store.stats().asked_tokens
    error = refusal(lambda: ask("word " * 5000))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in error["message"]
    assert "messages takes 50" in error["message"]
    with pytest.raises(openai.BadRequestError):
        ask("word " * 5000, stream=True)
    assert served[0].store.stats().asked_tokens == before
    create = served[1].completions.create
    answer = create(model="tiny", prompt=[5] * (CONTEXT - 3), max_tokens=50, temperature=0)
    assert answer.usage.total_tokens == CONTEXT  # what there is room for
    assert answer.choices[0].finish_reason == "length"


def test_a_request_that_is_too_large(model, tokenizer):
    with serving(model, tokenizer, limits=Limits(prompt_bytes=1000)) as (_, talk):
        url = f"{talk.base_url}completions"

        def parts():
            for _ in range(3):
                yield b" " * 30_000

        for content in (b" " * 69_537, b" " * 3 * 10**6, parts()):
            answer = httpx2.post(url, content=content, headers=JSON, trust_env=False)
            assert answer.status_code == 413
            assert "69536 bytes" in answer.json()["error"]["message"]
        answer = talk.completions.create(model="tiny", prompt="a", max_tokens=2)
        assert answer.usage.completion_tokens == 2


class Panic(BaseException):
    """As tokenizers raise it."""


def test_a_panic_is_reported_and_over(ask, served):
    def panic(*_):
        raise Panic

    hook = served[0].model.model.layers[1].register_forward_pre_hook(panic)
    try:
        assert "its log says why" in refusal(lambda: ask("Panic."), 500)["message"]
    finally:
        hook.remove()
    assert said(ask())


def test_a_failure_is_reported_and_over(ask, served):
    layer = served[0].model.model.layers[1]
    kept, layer.mlp = layer.mlp, None
    try:
        error = refusal(lambda: ask("Fail."), 500)
        assert error["type"] == "server_error"
        with pytest.raises(openai.APIError, match="its log says why"):
            list(ask("Fail.", stream=True))
    finally:
        layer.mlp = kept
    assert said(ask())


# -- several clients ---------------------------------------------------------------------------


def test_eight_clients_at_once(served, ask):
    texts = [f"Question {index}?" for index in range(8)]
    alone = [said(ask(text)) for text in texts]
    served[0].store.clear()

    def answer(index):
        stream = bool(index % 2)
        found = ask(texts[index], stream=stream)
        return "".join(pieces(found)[0]) if stream else said(found)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answer, range(8))) == alone


def test_who_leaves_is_not_answered_further(model, tokenizer):
    model.generation_config.eos_token_id = None
    with serving(model, tokenizer, limits=Limits(sequences=1)) as (engine, talk):
        create = talk.completions.create
        stream = create(model="tiny", prompt="A long story.", max_tokens=4000, stream=True)
        next(iter(stream))
        impatient = talk.with_options(timeout=0.3)
        for _ in range(2):  # one waits its turn, the other would
            with pytest.raises(openai.APITimeoutError):
                impatient.completions.create(model="tiny", prompt="Not yet.", max_tokens=4000)
        health = httpx2.get(str(talk.base_url).replace("/v1/", "/health"), trust_env=False)
        assert health.json() == {"status": "ok"}  # while it is busy
        stream.close()
        answer = create(model="tiny", prompt="A long story.", max_tokens=3, temperature=0)
        assert answer.usage.completion_tokens == 3
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        before = engine.store.stats().tokens
        assert 3 < before < 3500
        with pytest.raises(openai.APITimeoutError):  # now it is its turn
            impatient.completions.create(model="tiny", prompt="Not again.", max_tokens=4000)
        create(model="tiny", prompt="The end.", max_tokens=1)
        assert engine.store.stats().tokens - before < 3500


def test_closing_ends_what_runs_and_what_waits(model, tokenizer):
    model.generation_config.eos_token_id = None
    with serving(model, tokenizer, limits=Limits(sequences=1)) as (engine, talk):
        create = talk.completions.create
        options = {"model": "tiny", "max_tokens": 4000}
        stream = iter(create(prompt="A story.", stream=True, **options))
        next(stream)
        with ThreadPoolExecutor() as threads:
            waiting = [
                threads.submit(create, prompt="Another.", stream=stream, **options)
                for stream in (False, True)
            ]
            until(lambda: engine.waiting == 2)
            engine.close()
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            for one in waiting:
                with pytest.raises(openai.APIStatusError, match="shutting down"):
                    one.result()
