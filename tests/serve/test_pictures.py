"""Pictures of an answer's cache in its stream: what they show, to whom, and at what cost."""

from __future__ import annotations

import logging

import openai
import pytest
import torch
from support.live_server import asking, client, refusal, serving

from kvkeep.host import host_of
from kvkeep.serve import pictures
from kvkeep.serve.keys import Keys

WATCHED = {
    "model": "tiny",
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_cache": True, "include_usage": True},
}


def watched(talk, text, tokens=12, **options):
    """The pictures of an answer, its text and its usage."""
    made, said, usage = [], "", None
    options = WATCHED | {"max_tokens": tokens} | options
    for chunk in talk.chat.completions.create(messages=asking(text), **options):
        if hasattr(chunk, "cache"):
            assert not chunk.choices
            made.append(chunk.cache)
        for choice in chunk.choices:
            said += choice.delta.content or ""
        usage = getattr(chunk, "usage", None) or usage
    return made, said, usage


def own_text(picture):
    return "".join(node["text"] for node in picture["prefixes"])


@pytest.fixture
def endless(model):
    model.generation_config.eos_token_id = None
    return model


def test_the_last_picture_shows_all_that_the_answer_was_fed(endless, tokenizer):
    with serving(endless, tokenizer) as (engine, talk):
        made, said, usage = watched(talk, "Who are you?")
        last = made[-1]
        assert last["tokens"] == usage.prompt_tokens + usage.completion_tokens - 1
        assert (last["prompt"], last["found"]) == (usage.prompt_tokens, 0)
        text = "".join(last["texts"])
        assert "Who are you?" in text
        assert said.startswith(text[text.index("assistant\n") + len("assistant\n") :][:20])
        assert [layer["kept"] for layer in last["layers"]] == [[last["tokens"]]] * 2
        assert last["live_bytes"] == last["full_bytes"]
        nodes = last["prefixes"]
        assert sum(node["shared"] for node in nodes) == last["tokens"]
        assert sum(node["bytes"] for node in nodes) == engine.store.nbytes
        assert text.startswith(nodes[1]["text"].removesuffix("…"))
        again, _, usage = watched(talk, "Who are you?", 2)
        found = usage.prompt_tokens_details.cached_tokens
        assert again[-1]["found"] == found > 10
        assert again[-1]["layers"][0]["cells"][0][:found] == "9" * found  # all shared


def test_pictures_come_while_the_answer_goes_on(endless, tokenizer, monkeypatch):
    monkeypatch.setattr(pictures, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(pictures, "_SHARE", 1e9)
    with serving(endless, tokenizer, cache="h2o:24") as (_, talk):
        made, *_ = watched(talk, "Hello. " * 9, 40)
        assert len(made) > 3
        tokens = [one["tokens"] for one in made]
        assert tokens == sorted(set(tokens))
        assert {count for layer in made[-1]["layers"] for count in layer["kept"]} == {24}
        assert len({str(one["layers"]) for one in made}) == len(made)


def test_another_ones_prompts_are_not_shown(model, tokenizer):
    names = {"a": "ada", "b": "ben"}
    with serving(model, tokenizer, keys=Keys(names), key="a") as (_, ada):
        ben = client(str(ada.base_url), "b")
        watched(ada, "My code is 31415926.")
        seen = watched(ben, "Hello.")[0][-1]
        assert sum(node["tokens"] for node in seen["prefixes"]) == seen["tokens"]
        assert "31415926" not in str(seen)
        other = watched(ada, "My name is Ada.")[0][-1]  # shares with the first, but its text
        others = [node for node in other["prefixes"] if not node["shared"]]
        assert len(others) > 1
        assert {node["text"] for node in others} == {""}
        assert "31415926" not in str(other)
        assert "My name" in own_text(other)


def test_who_shares_nothing_sees_no_prefixes(model, tokenizer):
    with serving(model, tokenizer, share=False) as (_, talk):
        assert watched(talk, "Hello.")[0][-1]["prefixes"] is None


def test_an_error_in_a_picture_is_not_the_answers(model, tokenizer, monkeypatch, caplog):
    with serving(model, tokenizer) as (_, talk):
        made, said, _ = watched(talk, "Hello.")
        assert made
        for broken in ("taken", "picture"):
            with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "kvkeep.serve"):
                patch.setattr(pictures, broken, lambda *_, **__: 1 / 0)
                assert watched(talk, "Hello.")[:2] == ([], said)
            assert "goes on without" in caplog.text
            caplog.clear()


def test_caches_are_not_looked_at_unless_someone_asks(model, tokenizer, monkeypatch, ask):
    looked = []
    monkeypatch.setattr(pictures, "taken", lambda cache: looked.append(cache) or 1 / 0)
    ask("Hello.")
    assert not looked


@pytest.mark.parametrize("options", [{"n": 2}, {"stream": False}])
def test_one_streamed_answer_is_shown(ask, options):
    options = {"stream": True, "stream_options": {"include_cache": True}} | options
    error = refusal(lambda: ask("Hello.", **options))
    assert error["param"] == "stream_options.include_cache"
    assert "give stream true and n 1" in error["message"]
    with pytest.raises(openai.BadRequestError, match="give true or false"):
        ask("Hello.", **options | {"n": 1, "stream_options": {"include_cache": 1}})


class Answered:
    """As much of an answer as pictures need."""

    cached = 0

    def __init__(self, cache, ids):
        self.cache, self.ids, self.prompt = cache, ids, ids


def test_looks_are_paced(model, monkeypatch):
    host, ids = host_of(model), torch.arange(9)
    cache = host.new_cache()
    with host.attach(), torch.inference_mode():
        host.forward(ids[None], cache)
    now = [100.0]
    monkeypatch.setattr(pictures.time, "monotonic", lambda: now[0])
    answer, pace = Answered(cache, ids), pictures.Pace()
    one, other = (pictures.Pictures(lambda ids: list(map(str, ids)), None, pace) for _ in "ab")
    first = one.look(answer)
    now[0] += 9
    assert one.look(answer) is None  # the client has not got the first
    assert first.make()["tokens"] == 9
    first.got()
    assert one.look(answer)
    now[0] += 0.2
    assert one.look(answer, last=True)
    one._got()
    assert one.look(answer) is None  # less than a quarter of a second
    pace.took(0.1)  # which is 5 % of two seconds
    now[0] += 1.9
    assert one.look(answer) is None
    assert other.look(answer) is None
    now[0] += 0.2
    assert other.look(answer)
    assert one.look(Answered(None, ids), last=True) is None
