"""`kvkeep serve`, as a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
import torch
import typer
from support.live_server import SYSTEM, asking, client, pieces, refusal, said
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app as command
from kvkeep.errors import StateError
from kvkeep.hf.generate import Question, generate
from kvkeep.hf.models import load
from kvkeep.serve.http.listen import bind, listen
from kvkeep.serve.limits import Limits


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


@pytest.mark.parametrize("size", ["small", pytest.param("real", marks=pytest.mark.slow)])
def test_the_command(tmp_path, monkeypatch, stand_in_home, size):
    if size == "small":
        monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    model, tokenizer = load("smollm2-135m", "float32", "cpu")
    options = {"model": "keeper", "temperature": 0, "max_tokens": 8}
    france, self = asking("What is the capital of France?"), asking("Who are you?")
    expected = generate(
        model,
        tokenizer,
        Question(france[1]["content"], system=SYSTEM["content"]),
        cache="keep_all",
        max_new_tokens=8,
    )
    kvkeep.detach(model)
    plain = model.generate(expected.prompt[None], max_new_tokens=8, do_sample=False)
    assert plain[0].equal(expected.ids)
    with started("--name", "keeper", "--store", str(tmp_path), KVKEEP_API_KEY="secret") as (
        url,
        process,
    ):
        page = process.stdout.readline().split()[-1]
        assert page == url.removesuffix("v1")
        assert "<title>" in httpx2.get(page, trust_env=False).text
        assert refusal(client(url).models.list, 401)["code"] == "invalid_api_key"
        talk = client(url, "secret").chat.completions
        first = talk.create(messages=france, **options)
        assert said(first) == expected.text
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert first.usage.prompt_tokens == len(expected.prompt)
        assert "".join(pieces(talk.create(messages=france, stream=True, **options))[0]) == (
            expected.text
        )
        second = talk.create(messages=self, **options)
        assert 10 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
        if size == "real":
            party = client(url, "secret").completions.create(
                prompt="😀🎉🚀😀🎉🚀😀🎉🚀😀🎉🚀😀", stream=True, **options
            )
            texts = [chunk.choices[0].text for chunk in party]
            assert "".join(texts) == "🎉🚀"  # the third emoji is cut
            assert {"🎉", "🚀"} <= set(texts)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    if size == "small":
        return
    with started("--name", "keeper", "--store", str(tmp_path)) as (url, process):
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
        (("--store-budget", "2GB"), "--store-budget needs --store"),
        (("--store", "x", "--store-budget", "much"), "give a size"),
        (("--port", "0", "--store", "lm://127.0.0.1:1", "--store-budget", "2GB"), "enforces none"),
        (("--port", "0", "--store", "redis://127.0.0.1:1", "--store-budget", "2GB"), "maxmemory"),
        (("--api-key", " "), "--api-key is empty"),
        (("--api-key", "a b"), "printable ASCII without spaces"),
        (("--api-key", "a", "--key-file", "keys"), "exclude each other"),
        (("--api-key", "a", "--share"), "--share is for servers without keys"),
        (("--key-file", "no/such/file"), "cannot read keys"),
        (("--timeout", "inf"), "timeout_s is inf; give a finite number"),
        (("--allow-host", "http://gpu.example"), "give a name such as"),
        (("--allow-origin", "chat.example"), "give a scheme and a host"),
        (("--prompt-bytes", "much"), "give a size"),
        (("--memory", "much"), "give a size"),
        (("--host", "no.such.host.invalid"), "no host"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7"),
        (("--port", "0", "--cache", "keep_some"), "no policy 'keep_some'"),
        (("--port", "0", "--model", "gpt-9"), "no model 'gpt-9'"),
    ):
        result = run(*options)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "warning" not in result.stderr


def test_the_page_names_every_option():
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    options = typer.main.get_command(command).commands["serve"].params
    named = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {name for name in named if f"`{name}`" not in page} <= {"--debug", "--help"}


def test_an_empty_key_in_the_environment_is_no_server_without_keys():
    result = run("--port", "0", "--model", "gpt-9", KVKEEP_API_KEY="")
    assert result.exit_code == 2
    assert "KVKEEP_API_KEY is empty" in result.stderr


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


@pytest.mark.parametrize(
    ("options", "share", "hosts"),
    [
        ((), True, ["127.0.0.1"]),
        (("--no-share",), False, ["127.0.0.1"]),
        (("--host", "0.0.0.0"), False, ["0.0.0.0"]),
        (("--host", "0.0.0.0", "--share", "--allow-host", "gpu.example"), True, None),
    ],
)
def test_who_shares_prompts(model, tokenizer, monkeypatch, options, share, hosts):
    given = {}
    monkeypatch.setattr("kvkeep.hf.models.load", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr("kvkeep.serve.app.application", lambda engine, **said: given.update(said))
    monkeypatch.setattr(
        "kvkeep.serve.http.listen.run", lambda app, bound, **said: given.update(said)
    )
    limits = ("--queue", "3", "--wait", "9", "--answer-tokens", "99", "--prompt-bytes", "2KB")
    limits += ("--sequences", "5", "--memory", "1GB")
    assert run("--port", "0", *options, *limits).exit_code == 0
    assert given["share"] == share
    assert given["keys"] is None
    assert given["hosts"] == (hosts or ["0.0.0.0", "gpu.example"])
    assert given["limits"] == Limits(3, 9, 99, 2000, sequences=5, cache_bytes=10**9)


def test_what_clients_may_put_into_a_store_is_bounded(model, tokenizer, monkeypatch, tmp_path):
    engines = []
    monkeypatch.setattr("kvkeep.hf.models.load", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr(
        "kvkeep.serve.app.application", lambda engine, **said: engines.append(engine)
    )
    monkeypatch.setattr("kvkeep.serve.http.listen.run", lambda app, bound, **said: None)
    place = tmp_path / "store"
    result = run("--port", "0", "--store", str(place), "--store-budget", "400KB")
    assert result.exit_code == 0, result.output
    (engine,) = engines
    put = 0
    for start in range(4):  # four blocks each
        tokens = torch.arange(start, start + 1024)
        cache = engine.store.read(model, tokens).cache
        put += cache.nbytes
    stored = sum(path.stat().st_size for path in (place / "blocks").rglob("*") if path.is_file())
    assert 0 < stored <= 400_000 < put
    engine.close()


def test_without_the_extra():
    code = (
        "import sys; sys.modules['uvicorn'] = None; from typer.testing import CliRunner; "
        "from kvkeep.cli.app import app; result = CliRunner().invoke(app, ['serve']); "
        "assert result.exit_code == 2; assert \"pip install 'kvkeep[serve]'\" in result.stderr"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
