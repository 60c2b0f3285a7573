"""The server, as OpenAI's own client sees it: in a thread with a tiny model, and as the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import openai
import pytest
import uvicorn
from families import tiny
from transformers import AutoTokenizer
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import app as command
from kvkeep.errors import StateError
from kvkeep.hf.generate import _Streamer, generate
from kvkeep.hf.models import resolve
from kvkeep.serve.app import application
from kvkeep.serve.engine import Engine
from kvkeep.serve.listen import bind, listen
from kvkeep.serve.stops import Stops

SYSTEM = {"role": "system", "content": "You keep a lighthouse. You answer in one short sentence."}
CONTEXT = 4096


def asking(text):
    return [SYSTEM, {"role": "user", "content": text}]


def client(url, key="none"):
    http = httpx2.Client(trust_env=False)
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120, http_client=http)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))


@pytest.fixture
def model():
    """Of random weights, so its text is of random tokens."""
    return small()


def small():
    return tiny("llama", vocab_size=49152, max_position_embeddings=CONTEXT, eos_token_id=2)


@contextmanager
def serving(model, tokenizer, *, cache="keep_all", **options):
    """A server in a thread: its engine, and a client."""
    store = kvkeep.PrefixStore()
    engine = Engine(model, tokenizer, name="tiny", cache=cache, store=store)
    bound = bind("127.0.0.1", 0)
    url = listen(bound)
    config = uvicorn.Config(application(engine, **options), lifespan="on", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield engine, client(url)
    finally:
        server.should_exit = True
        thread.join()
        assert "generate" not in model.__dict__  # detached
        store.check()


@pytest.fixture(scope="module")
def served(tokenizer):
    with serving(small(), tokenizer) as both:
        yield both


@pytest.fixture
def ask(served):
    """Answers of the tiny model, greedy and short."""

    def answer(text="Hello.", messages=None, **options):
        options = {"model": "tiny", "temperature": 0, "max_tokens": 12} | options
        return served[1].chat.completions.create(messages=messages or asking(text), **options)

    return answer


def pieces(stream):
    """The text of each choice's chunks."""
    found: dict[int, list[str]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice.delta.content or "")
    return found


def said(answer):
    return answer.choices[0].message.content


def refusal(call, status=400):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.status_code == status
    error = caught.value.body
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- stop strings and characters ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["b"], "abc", "a"),
        (["bc", "c"], "abcd", "a"),
        (["abc", "b"], "abc", "a"),  # "b" is whole before "abc" is
        (["aab"], "aaab!", "a"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["é", "😀"], "caf😀é", "caf"),
        (["never"], "nev", "nev"),
        (["x"], "", ""),
        ([], "all", "all"),
    ],
)
def test_stop_strings_do_not_depend_on_the_pieces(stops, text, expected):
    for size in (1, 2, 3, 100):
        cut = Stops(stops)
        given = []
        for start in range(0, len(text), size):
            given.append(cut.push(text[start : start + size]))
            assert expected.startswith("".join(given))
        assert "".join(given) + cut.rest() == expected
        assert cut.found == (expected != text)


@pytest.mark.parametrize("text", ["I say 👩‍👩‍👧 naïve 日本語!\n  x = 1", "😀🎉", " a"])
def test_streamed_characters_are_whole(tokenizer, text):
    ids = tokenizer(text, return_tensors="pt").input_ids
    for cut in range(ids.shape[1] + 1):
        given: list[str] = []
        streamer = _Streamer(tokenizer, given.append)
        streamer.put(ids)  # the prompt
        for token in ids[0, :cut]:
            streamer.put(token[None])
        streamer.end()
        whole = tokenizer.decode(ids[0, :cut])
        assert "".join(given) == whole.rstrip("\ufffd")
        assert not any("\ufffd" in piece for piece in given)
    assert "".join(given) == text


# -- answers -----------------------------------------------------------------------------------


def test_greedy_is_what_generate_says_and_the_next_prompt_begins_with_it(model, tokenizer):
    prompts = [
        tokenizer.apply_chat_template(
            asking(text), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        for text in ("Hello.", "Who?")
    ]
    expected = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    with serving(model, tokenizer) as (_, talk):
        for found, text, ids, whole in zip(
            (0, 12), ("Hello.", "Who?"), prompts, expected, strict=True
        ):
            answer = talk.chat.completions.create(
                model="tiny", messages=asking(text), temperature=0, max_tokens=12
            )
            new = whole[0, ids.shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True)
            assert said(answer) == text.rstrip("\ufffd")
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (ids.shape[1], len(new))
            assert usage.total_tokens == whole.shape[1]
            cached = usage.prompt_tokens_details.cached_tokens
            assert (cached == 0) if not found else (found < cached < ids.shape[1])
            assert answer.choices[0].finish_reason == "length"


def test_a_stream_is_the_same_text(ask):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(pieces(chunks)[0]) == said(whole)
    assert len(chunks) > 8
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in ask(stream=True))
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop(ask):
    whole = said(ask(max_tokens=40))
    for start, stop in ((5, 9), (11, 12), (20, 40)):
        string = whole[start:stop]
        first = whole.index(string)
        for options in ({"stop": string}, {"stop": ["no such text", string]}):
            answer = ask(max_tokens=40, **options)
            assert said(answer) == whole[:first]
            assert answer.choices[0].finish_reason == "stop"
        chunks = list(ask(max_tokens=40, stop=string, stream=True))
        assert "".join(pieces(chunks)[0]) == whole[:first]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert said(ask(max_tokens=40, stop=whole + "x")) == whole  # held back, then given


def test_the_end_token_ends_it(ask, served):
    model = served[0].model
    tokens = ask().usage.completion_tokens
    logits = model.lm_head.weight.data
    kept = logits[2].clone()
    try:
        logits[2] = 0
        model.generation_config.eos_token_id = [2, *range(100, 49152)]
        answer = ask("Anything else?")
    finally:
        logits[2], model.generation_config.eos_token_id = kept, 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < tokens


def test_sampling(ask):
    options = {"temperature": 1.0, "max_tokens": 8}
    first = said(ask(seed=7, **options))
    assert said(ask(seed=8, **options)) != first
    assert said(ask(seed=7, **options)) == first
    assert said(ask(seed=7, top_p=0.0, **options)) == said(ask(max_tokens=8))  # the likeliest
    unseeded = {said(ask(**options)) for _ in range(3)}
    assert len(unseeded) == 3
    assert said(ask(seed=7, temperature=1e-12, max_tokens=8)) == said(ask(max_tokens=8))


def test_several_choices(ask):
    options = {"temperature": 1.0, "seed": 3, "n": 3}
    answer = ask(**options)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 36
    found = pieces(ask(stream=True, **options))
    assert ["".join(found[index]) for index in range(3)] == texts
    assert said(ask(**options | {"n": 1})) == texts[0]


def test_conversations_in_every_form(ask):
    text = "You keep a lighthouse. You answer in one short sentence."
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    user = {"role": "user", "content": "Hello.", "name": "ada"}
    for role, content in (("system", parts), ("developer", text)):
        messages = [{"role": role, "content": content}, user]
        answer = ask(messages=messages, user="ada", metadata={"a": "b"}, extra_body={"else": 1})
        assert said(answer) == said(ask())
    first = ask()
    messages = [*asking("Hello."), {"role": "assistant", "content": said(first)}]
    second = ask(messages=[*messages, {"role": "user", "content": "And then?"}])
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_completions(served, tokenizer):
    prompt = "The lighthouse was built in"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"model": "tiny", "temperature": 0}
    create = served[1].completions.create
    whole = create(prompt=prompt, **options)
    assert whole.usage.completion_tokens == 16
    assert whole.object == "text_completion"
    text = whole.choices[0].text
    for same in ([prompt], ids[0].tolist(), ids.tolist()):
        assert create(prompt=same, **options).choices[0].text == text
    assert "".join(c.choices[0].text for c in create(prompt=prompt, stream=True, **options)) == text
    chunks = list(create(prompt=prompt, stream=True, stop=text[4:6], max_tokens=16, **options))
    assert "".join(c.choices[0].text for c in chunks) == text[:4]
    assert chunks[-1].choices[0].finish_reason == "stop"


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.place }})"
    "{% endfor %}{% endfor %}{% if messages[-1].role == 'assistant' %}"
    "{{ raise_exception('nothing to answer') }}{% endif %}"
)


def test_tools(ask, served, tokenizer):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Skye"}'},
    }
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]
    for field, options in (("tools", {"tools": [TOOL]}), ("tool_calls", {"messages": messages})):
        error = refusal(lambda options=options: ask(**options))
        assert error["param"] == field
        assert "no place for" in error["message"]
    kept, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    try:
        expected = "[user] Rain?[assistant] weather(Skye)[tool] yes"
        seen = ask(messages=messages).usage.prompt_tokens
        assert seen == len(tokenizer(expected).input_ids)
        seen = ask(messages=messages, tools=[TOOL]).usage.prompt_tokens
        assert seen == len(tokenizer(json.dumps([TOOL]) + expected).input_ids)
        assert ask(messages=messages, tools=[TOOL], tool_choice="none").usage.prompt_tokens < seen
        error = refusal(lambda: ask(messages=[{"role": "assistant", "content": "?"}]))
        assert "nothing to answer" in error["message"]
        tokenizer.chat_template = None
        assert "use /v1/completions" in refusal(ask)["message"]
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("cache", ["h2o:24", "window:24,sinks=2", "keep_all@fixed:200"])
def test_other_caches(model, tokenizer, cache):
    prompt = "The lighthouse stands on a rock, and the keeper counts the ships. " * 3
    expected = generate(model, tokenizer, prompt, cache=cache, max_new_tokens=8, raw=True).text
    kvkeep.detach(model)
    with serving(model, tokenizer, cache=cache) as (engine, talk):
        for again in (False, True):
            answer = talk.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=8
            )
            assert answer.choices[0].text == expected
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (cached > 30) == (again and "fixed" in cache)
        assert bool(engine.why_no_reuse) == cache.startswith("h2o")
        assert engine.context == (200 if "fixed" in cache else CONTEXT)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
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
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
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


def test_harmless_values_of_unsupported_fields(ask):
    off = {"logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}}
    assert said(ask(tools=[], tool_choice="auto", n=1, stop=None, logit_bias={}, **off)) == said(
        ask()
    )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": "a", "logprobs": 0}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_what_is_wrong_with_completions_is_named(served, options, param):
    error = refusal(lambda: served[1].completions.create(model="tiny", **options))
    assert error["param"] == param


def test_bodies_that_are_no_requests(served):
    url = f"{served[1].base_url}chat/completions"
    for body in (b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 10**5, b"\x00"):
        answer = httpx2.post(url, content=body, trust_env=False)
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"]
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = httpx2.post(url, content=body, trust_env=False)
    assert "no Unicode text" in answer.json()["error"]["message"]


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


def test_a_prompt_that_is_too_long(served, ask):
    before = served[0].store.stats().asked_tokens
    error = refusal(lambda: ask("word " * 5000))
    assert error["code"] == "context_length_exceeded"
    assert "4096 tokens" in error["message"]
    assert "messages takes 50" in error["message"]
    with pytest.raises(openai.BadRequestError):
        ask("word " * 5000, stream=True)
    assert served[0].store.stats().asked_tokens == before
    create = served[1].completions.create
    answer = create(model="tiny", prompt=[5] * (CONTEXT - 3), max_tokens=50, temperature=0)
    assert answer.usage.total_tokens == CONTEXT  # what there is room for
    assert answer.choices[0].finish_reason == "length"


def test_a_request_that_is_too_large(model, tokenizer):
    with serving(model, tokenizer, body_limit=1000) as (_, talk):
        url = f"{talk.base_url}completions"

        def parts():
            for _ in range(3):
                yield b" " * 500

        for content in (b" " * 1001, b" " * 3 * 10**6, parts()):
            answer = httpx2.post(url, content=content, trust_env=False)
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["error"]["message"]
        answer = talk.completions.create(model="tiny", prompt="a", max_tokens=2)
        assert answer.usage.completion_tokens == 2


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
    with serving(model, tokenizer) as (engine, talk):
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
    with serving(model, tokenizer) as (engine, talk):
        create = talk.completions.create
        options = {"model": "tiny", "max_tokens": 4000}
        streams = [iter(create(prompt="A story.", stream=True, **options)) for _ in range(3)]
        next(streams[0])
        engine.close()
        for stream in streams:
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)


# -- the command -------------------------------------------------------------------------------


@contextmanager
def started(*options, **environment):
    """`kvkeep serve` on a free port: its URL, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvkeep", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.communicate()


def test_the_command(tmp_path, smollm2):
    model, tokenizer = smollm2
    options = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 8}
    france, self = asking("What is the capital of France?"), asking("Who are you?")
    expected = generate(
        model,
        tokenizer,
        france[1]["content"],
        system=SYSTEM["content"],
        cache="keep_all",
        max_new_tokens=8,
    )
    kvkeep.detach(model)
    plain = model.generate(
        expected.ids[:, : expected.prompt_tokens], max_new_tokens=8, do_sample=False
    )
    assert plain.equal(expected.ids)
    with started("--store", str(tmp_path), KVKEEP_API_KEY="secret") as (url, process):
        assert refusal(client(url).models.list, 401)["code"] == "invalid_api_key"
        talk = client(url, "secret").chat.completions
        first = talk.create(messages=france, **options)
        assert said(first) == expected.text
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert first.usage.prompt_tokens == expected.prompt_tokens
        assert "".join(pieces(talk.create(messages=france, stream=True, **options))[0]) == (
            expected.text
        )
        second = talk.create(messages=self, **options)
        assert 10 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
        party = client(url, "secret").completions.create(
            prompt="😀🎉🚀😀🎉🚀😀🎉🚀😀🎉🚀😀", stream=True, **options
        )
        texts = [chunk.choices[0].text for chunk in party]
        assert "".join(texts) == "🎉🚀"  # the third emoji is cut
        assert {"🎉", "🚀"} <= set(texts)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with started("--store", str(tmp_path)) as (url, process):
        again = client(url).chat.completions.create(messages=self, **options)
        assert said(again) == said(second)
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_told_to_stop_while_it_answers(model, tokenizer, tmp_path):
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    name = str(tmp_path)
    with started("--model", name) as (url, process):
        create = client(url).completions.create
        stream = iter(create(model=name, prompt="A story.", max_tokens=4000, stream=True))
        next(stream)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(create, model=name, prompt="Another.", max_tokens=4000)
            while process.poll() is None and not waiting.running():
                pass
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            with pytest.raises(openai.APIError):  # told so, or not let in any more
                waiting.result()
        assert process.wait(60) == 0


def run(*options, **environment):
    return CliRunner().invoke(command, ["serve", *options], env=environment)


def test_bad_options():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("--port", str(port))
        assert result.exit_code == 2
        assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    for options, message in (
        (("--budget", "much"), "give a size"),
        (("--api-key", " "), "--api-key is empty"),
        (("--host", "no.such.host.invalid"), "no host"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7"),
        (("--port", "0", "--cache", "keep_some"), "no policy 'keep_some'"),
        (("--port", "0", "--model", "gpt-9"), "no model 'gpt-9'"),
    ):
        result = run(*options)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "warning" not in result.stderr


def test_a_port_that_another_takes_meanwhile():
    first = bind("127.0.0.1", 0)
    second = bind(*first.getsockname())
    with first, second:
        listen(first)
        with pytest.raises(StateError, match="is in use"):
            listen(second)


def test_open_to_others():
    result = run("--host", "0.0.0.0", "--port", "0", "--model", "gpt-9")
    assert "warning: without an API key" in result.stderr
    result = run("--host", "0.0.0.0", "--port", "0", "--model", "gpt-9", KVKEEP_API_KEY="a")
    assert "warning" not in result.stderr


def test_without_the_extra():
    code = (
        "import sys; sys.modules['uvicorn'] = None; from typer.testing import CliRunner; "
        "from kvkeep.cli import app; result = CliRunner().invoke(app, ['serve']); "
        "assert result.exit_code == 2; assert \"pip install 'kvkeep[serve]'\" in result.stderr"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
