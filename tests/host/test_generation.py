"""Generation and the server's engine on a host that has no generation of its own."""

from __future__ import annotations

from threading import Event

import pytest
import torch
from support.tiny_host import TinyHost, TinyModel, tiny_model

from kvkeep import PrefixStore
from kvkeep.errors import ShapeError
from kvkeep.host import Sampling, drawn, host_of, register
from kvkeep.host.generation import GenerationOptions
from kvkeep.serve.engine import Engine
from kvkeep.serve.events import TextDelta, Usage
from kvkeep.serve.requests import CompletionRequest, read

PROMPT = torch.arange(3, 23)[None]


class Letters:
    """A tokenizer of one token a character."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) - 64 for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def greedy(model):
    """The 12 likeliest tokens after the prompt, each by a forward of all tokens."""
    ids = PROMPT
    for _ in range(12):
        with torch.inference_mode():
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids


def generated(model, cache=None, **options):
    host = host_of(model)
    cache = host.new_cache() if cache is None else cache
    options = {"max_new_tokens": 12} | options
    return host.generate(Letters(), PROMPT, cache, GenerationOptions(**options))


@pytest.mark.parametrize("chunk", [None, 7])
def test_greedy_tokens_are_those_of_whole_forwards(model, greedy, chunk):
    pieces = []
    found = generated(model, prefill_chunk=chunk, on_text=pieces.append)
    assert found.ids.equal(greedy)
    assert (found.tokens, found.prompt_tokens) == (12, 20)
    assert found.text == "".join(pieces) == Letters().decode(greedy[0, 20:].tolist())
    assert found.cache.seen == (31,)  # the last token is not fed


def test_a_cache_that_holds_a_part_of_the_prompt(model, greedy):
    host = host_of(model)
    cache = host.new_cache()
    with torch.inference_mode():
        host.feed(PROMPT[:, :13], cache)
    assert generated(model, cache).ids.equal(greedy)
    with pytest.raises(ShapeError, match="holds 31 tokens; give one row"):
        generated(model, cache)


def test_what_ends_a_generation(model, greedy):
    class Ending(TinyModel):
        pass

    class EndingHost(TinyHost):
        def end_tokens(self):
            return {int(greedy[0, 22])}

    first = greedy[0, 20:].tolist().index(int(greedy[0, 22])) + 1
    register(Ending, EndingHost)
    ending = Ending()
    ending.load_state_dict(model.state_dict())
    assert generated(ending).tokens == first
    asked = []
    assert generated(model, stopped=lambda: len(asked) == 4 or asked.append(0)).tokens == 5


def test_sampling(model, greedy):
    def answer(**options):
        return generated(model, max_new_tokens=12, **options).ids

    assert answer(temperature=2.0, seed=3).equal(answer(temperature=2.0, seed=3))
    assert not answer(temperature=2.0, seed=3).equal(answer(temperature=2.0, seed=4))
    assert answer(temperature=2.0, top_p=1e-6, seed=3).equal(greedy)


def test_top_p_draws_from_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().expand(400, 4)
    assert drawn(logits, Sampling(1.0, top_p=0.7)).unique().tolist() == [1, 3]
    assert drawn(logits, Sampling(1.0)).unique().tolist() == [0, 1, 2, 3]


def test_the_engine_answers_with_another_library(model, greedy):
    body = b'{"model": "tiny", "prompt": "%s", "max_tokens": 12, "temperature": 0}'
    request = read(body % Letters().decode(PROMPT[0].tolist()).encode(), CompletionRequest)
    engine = Engine(model, Letters(), name="tiny", store=PrefixStore(block=4))
    try:
        for cached in (0, 19):
            events, ended = [], Event()

            def emit(event, events=events, ended=ended):
                events.append(event)
                if isinstance(event, Usage):
                    ended.set()

            engine.submit(*engine.prompts.encode(request), emit)
            assert ended.wait(60)
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            assert text == Letters().decode(greedy[0, 20:].tolist())
            assert events[-1] == Usage(20, 12, cached)
    finally:
        engine.close()
