"""A server in a thread, and OpenAI's client of it, for tests."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx2
import openai
import pytest

import kvkeep
from kvkeep.serve.app import application
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.listen import Server, bind, configured, listen
from kvkeep.serve.limits import Limits
from kvkeep.serve.requests.completions import GenerationRequest
from support.short_tokenizer import SIZE
from support.tiny_models import tiny

SYSTEM = {"role": "system", "content": "You keep a lighthouse. You answer in one short sentence."}
CONTEXT = 4096
JSON = {"content-type": "application/json"}


def asking(text):
    return [SYSTEM, {"role": "user", "content": text}]


def client(url, key="none"):
    http = httpx2.Client(trust_env=False, verify=False)  # certificates take 30 ms to load
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120, http_client=http)


def small(**options):
    options = {"max_position_embeddings": CONTEXT, "eos_token_id": 2} | options
    return tiny("llama", vocab_size=SIZE, **options)


@contextmanager
def serving(
    model,
    tokenizer,
    *,
    cache="keep_all",
    limits=None,
    key="none",
    sending=None,
    store=None,
    **options,
):
    """A server in a thread: its engine, and a client. `sending`: bytes that the system takes before
    the client does."""
    store = kvkeep.PrefixStore() if store is None else store
    limits = limits or Limits()
    engine = Engine(model, tokenizer, name="tiny", cache=cache, store=store, limits=limits)
    bound = bind("127.0.0.1", 0)
    if sending is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending)
    url = listen(bound)
    options = {"share": "keys" not in options} | options
    app = application(engine, **options)
    engine.admission = app.state.admission
    engine.server = server = Server(configured(app, limits), engine.close)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield engine, client(url, key)
    finally:
        server.should_exit = True
        thread.join()
        assert "generate" not in model.__dict__  # detached
        store.check()


def until(condition):
    """Wait for what is to come about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


@contextmanager
def scripted(tokenizer, *texts, free=False):
    """Every answer says a text: each of a prompt's answers the next one, then the first again.
    `free`: the model goes on by itself."""
    scripts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    count = itertools.count()
    original = GenerationRequest.params

    def params(self, prompt_tokens, most, ends, **further):
        def follow():
            script = [*scripts[next(count) % len(scripts)], min(ends)]

            def forced(ids, logits):
                at = ids.shape[1] - prompt_tokens
                if free and at >= len(script) - 1:
                    return logits
                wanted = script[min(at, len(script) - 1)]
                return logits.scatter(-1, ids.new_tensor([[wanted]]), 1e4)

            return forced

        own = original(self, prompt_tokens, most, ends, **further)
        return replace(own, own_processors=[*own.own_processors, follow])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationRequest, "params", params)
        yield
