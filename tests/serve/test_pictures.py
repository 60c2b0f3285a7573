"""Pictures of an answer's cache in its stream: what they show, to whom, and at what cost."""

from __future__ import annotations

import logging
from threading import Event
from types import SimpleNamespace

import openai
import pytest
import torch
from support.live_server import asking, client, refusal, serving

from kvkeep.host import host_of
from kvkeep.serve import engine as engines
from kvkeep.serve import pictures
from kvkeep.serve.engine import Engine, RequestState
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
        assert "usage" in chunk.model_fields_set
        if hasattr(chunk, "cache"):
            assert not chunk.choices
            assert chunk.usage is None
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
    options = WATCHED | {"messages": asking("Hello. " * 9), "max_tokens": 3000}
    with serving(endless, tokenizer, cache="h2o:24") as (_, talk):
        made = []
        with talk.chat.completions.create(**options) as stream:
            for chunk in stream:
                made += [chunk.cache] if hasattr(chunk, "cache") else []
                if len(made) == 4:
                    break
        tokens = [one["tokens"] for one in made]
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 4
        assert {count for layer in made[-1]["layers"] for count in layer["kept"]} == {24}
        assert len({str(one["layers"]) for one in made}) == len(made)


def test_text_does_not_wait_for_a_picture(endless, tokenizer, monkeypatch):
    with serving(endless, tokenizer) as (engine, talk):
        texts, read = engine.prompts.texts, Event()
        monkeypatch.setattr(
            engine.prompts, "texts", lambda: lambda ids: read.wait(60) and texts()(ids)
        )
        said, made, usage = 0, [], None
        for chunk in talk.chat.completions.create(
            messages=asking("Hello."), max_tokens=12, **WATCHED
        ):
            made += [chunk.cache] if hasattr(chunk, "cache") else []
            said += sum(bool(choice.delta.content) for choice in chunk.choices)
            if chunk.choices and chunk.choices[0].finish_reason:
                assert said
                assert not made
                read.set()
            usage = chunk.usage or usage
        assert made[-1]["tokens"] == usage.total_tokens - 1


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


@pytest.fixture
def logged():
    """What the server logs of errors."""
    found, log = [], logging.getLogger("kvkeep.serve")
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def test_an_error_in_a_picture_is_not_the_answers(model, tokenizer, monkeypatch, logged):
    with serving(model, tokenizer) as (_, talk):
        made, said, _ = watched(talk, "Hello.")
        assert made
        for broken in ("taken", "picture"):
            with monkeypatch.context() as patch:
                patch.setattr(pictures, broken, lambda *_, **__: 1 / 0)
                assert watched(talk, "Hello.")[:2] == ([], said)
            assert logged == ["a cache picture failed; its answer continues without pictures"]
            logged.clear()


def test_the_store_is_asked_once_what_its_prefixes_are(endless, tokenizer, monkeypatch):
    monkeypatch.setattr(pictures, "_INTERVAL_S", 0.0)
    asked, real = [], engines.identity_of
    monkeypatch.setattr(engines, "identity_of", lambda *given: asked.append(given) or real(*given))
    with serving(endless, tokenizer) as (_, talk):
        made, *_ = watched(talk, "Hello.")
        assert len(made) > 1
        assert made[-1]["prefixes"]
        assert len(asked) == 1


def test_an_error_in_an_outline_is_not_the_pictures(model, tokenizer, monkeypatch, logged):
    with serving(model, tokenizer) as (engine, talk):
        for place, broken in ((engines, "identity_of"), (engine.store, "outline_of")):
            with monkeypatch.context() as patch:
                patch.setattr(place, broken, lambda *_: 1 / 0)
                last = watched(talk, "Hello.")[0][-1]
            assert last["prefixes"] is None
            assert last["layers"]
            assert len(logged) == 1
            assert logged.pop().startswith("the outline of a store failed")


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
    with pytest.raises(openai.BadRequestError, match="valid boolean"):
        ask("Hello.", **options | {"n": 1, "stream_options": {"include_cache": 1}})


class Answered:
    """As much of an answer as pictures need."""

    cached = 0

    def __init__(self, cache, ids):
        self.cache, self.ids, self.prompt = cache, ids, ids


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(pictures, "_SHARE", 0.05)
    monkeypatch.setattr(pictures, "_SAVED_S", 0.1)
    return [100.0]


@pytest.fixture
def maker(clock):
    maker = pictures.Maker(lambda: clock[0])
    yield maker
    maker.close()


def fed(model):
    host, ids = host_of(model), torch.arange(9)
    cache = host.new_cache()
    with host.attach(), torch.inference_mode():
        host.forward(ids[None], cache)
    return Answered(cache, ids)


def of_one(maker):
    return pictures.Pictures(lambda ids: list(map(str, ids)), None, maker)


def test_a_pace_saves_a_little_and_forgets_no_debt(clock):
    pace = pictures.Pace(lambda: clock[0])
    pace.took(0.09)  # of the 0.1 that are saved
    assert pace.free
    pace.took(0.03)
    assert not pace.free
    pace.took(0.1)  # 0.12 more than saved, which is 5 % of 2.4 s
    clock[0] += 2.3
    assert not pace.free
    clock[0] += 0.2
    assert pace.free


def test_an_answer_is_looked_at_when_its_client_can_use_it(model, maker, clock):
    answer, pictures_of_one = fed(model), of_one(maker)
    first = pictures_of_one.look(answer).result()
    clock[0] += 9
    assert pictures_of_one.look(answer) is None  # the client has not got the first
    assert '"tokens": 9' in first.json
    first.received()
    assert pictures_of_one.look(answer).result()
    assert pictures_of_one.look(answer, last=True).result()
    pictures_of_one._received()
    clock[0] += 0.2
    assert pictures_of_one.look(answer) is None  # less than a quarter of a second
    clock[0] += 0.1
    assert pictures_of_one.look(answer).result()
    assert pictures_of_one.look(Answered(None, answer.ids), last=True) is None


@pytest.mark.parametrize("last", [False, True])
def test_what_pictures_cost_is_paced(model, maker, clock, monkeypatch, last):
    monkeypatch.setattr(pictures, "_SHARE", 1e-9)
    monkeypatch.setattr(pictures, "_SAVED_S", 0.0)
    answer = fed(model)
    assert of_one(maker).look(answer, last=last).result()
    clock[0] += 1
    assert of_one(maker).look(answer, last=last) is None
    assert of_one(maker).look(answer, last=not last)


def test_only_last_pictures_wait_for_others_to_be_made(model, maker):
    answer, go_on = fed(model), Event()
    slow = pictures.Pictures(lambda ids: go_on.wait(60) and ["a"] * len(ids), None, maker)
    first = slow.look(answer)
    assert of_one(maker).look(answer) is None
    second = of_one(maker).look(answer, last=True)
    assert not second.done()
    go_on.set()
    assert second.result()
    assert first.done()
    assert of_one(maker).look(answer)


def test_who_was_shown_least_recently_is_next():
    shown = []

    def watched_by(name, looked):
        look = lambda answer, last: shown.append(answer)  # noqa: E731
        state = RequestState((), None, None, None, SimpleNamespace(looked=looked, look=look))
        state.answers, state.started = [name], True
        return state

    states = [watched_by("a", 3.0), watched_by("b", 1.0), watched_by("c", 2.0)]
    maker = SimpleNamespace(free=lambda last: True)
    Engine._show(SimpleNamespace(_maker=maker, _states=dict.fromkeys(states)))
    assert shown == ["b", "c", "a"]
