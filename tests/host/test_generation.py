"""One answer as a stream, and the server's engine, on a host of another library."""

from __future__ import annotations

from threading import Event

import pytest
import torch
from support.tiny_host import TinyHost, TinyModel, tiny_model

from kvkeep import PrefixStore, host
from kvkeep.errors import CapacityError, ShapeError
from kvkeep.generate import SamplingParams, sample, stream
from kvkeep.host import host_of, register
from kvkeep.serve.engine import Engine
from kvkeep.serve.events import TextDelta, Usage
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.completions import CompletionRequest

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


def generated(model, cache=None, chunk=None, each=lambda new: None, **params):
    """The answer, after `each` has got every token of it."""
    cache = host_of(model).new_cache() if cache is None else cache
    params = SamplingParams(**{"max_new_tokens": 12} | params)
    for new in stream(model, PROMPT, params, cache=cache, tokenizer=Letters(), chunk=chunk):
        each(new)
    return new.answer


@pytest.mark.parametrize("chunk", [None, 7])
def test_greedy_tokens_are_those_of_whole_forwards(model, greedy, chunk):
    pieces = []
    found = generated(model, chunk=chunk, each=lambda new: pieces.append(new.text))
    assert found.ids.equal(greedy[0])
    assert (len(found.tokens), len(found.prompt), found.reason) == (12, 20, "length")
    assert found.text == "".join(pieces) == Letters().decode(greedy[0, 20:].tolist())
    assert found.stats.seen == (31,)  # the last token is not fed
    assert found.ttft_s > 0
    assert found.tokens_per_s > 0


def test_a_cache_that_holds_a_part_of_the_prompt(model, greedy):
    own = host_of(model)
    cache = own.new_cache()
    with torch.inference_mode():
        own.feed(PROMPT[:, :13], cache)
    assert generated(model, cache).ids.equal(greedy[0])
    assert cache.fed == 31
    for refused in (cache, own.new_cache("keep_all@fixed:30")):
        held = refused.fed
        with pytest.raises((ShapeError, CapacityError), match=r"holds 3[01]( tokens)?; "):
            generated(model, refused)
        assert refused.fed == held
    with pytest.raises(ShapeError, match="one row"):
        next(stream(model, PROMPT.expand(2, -1), cache=own.new_cache()))


def test_a_prompt_beyond_the_context_is_the_callers_choice(model):
    cache = host_of(model).new_cache("window:16,sinks=2")
    prompt = PROMPT.repeat(1, 7)
    assert prompt.shape[1] > model.context
    *_, last = stream(model, prompt, SamplingParams(3), cache=cache, chunk=16)
    assert last.answer.stats.seen == (142,)


def test_an_interrupted_stream_leaves_the_cache_as_it_was(model, greedy):
    own = host_of(model)
    cache = own.new_cache()
    with torch.inference_mode():
        own.feed(PROMPT[:, :13], cache)

    def interrupt(ids, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(model, cache, processors=[interrupt])
    cache.rewind(13)
    assert generated(model, cache).ids.equal(greedy[0])


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
    assert len(generated(ending).tokens) == first

    def fifth(new):
        if len(new.answer.tokens) == 5:
            new.answer.cancel()

    found = generated(model, each=fifth)
    assert (len(found.tokens), found.reason) == (5, "cancelled")


def test_sampling(model, greedy):
    def answer(**options):
        return generated(model, **options).ids

    assert answer(temperature=2.0, seed=3).equal(answer(temperature=2.0, seed=3))
    assert not answer(temperature=2.0, seed=3).equal(answer(temperature=2.0, seed=4))
    assert answer(temperature=2.0, top_p=1e-6, seed=3).equal(greedy[0])


def test_top_p_draws_from_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().expand(400, 4)
    assert sample(logits, SamplingParams(temperature=1.0, top_p=0.7)).unique().tolist() == [1, 3]
    assert sample(logits, SamplingParams(temperature=1.0)).unique().tolist() == [0, 1, 2, 3]


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

            engine.submit(engine.prompts.encode(request).prompts, emit)
            assert ended.wait(60)
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            assert text == Letters().decode(greedy[0, 20:].tolist())
            assert events[-1] == Usage(20, 12, cached)
    finally:
        engine.close()


def test_names_that_moved_say_where(model):
    for name, new in (("GenerationOptions", "SamplingParams"), ("Generation", "Answer")):
        with pytest.raises(ImportError, match=rf"host.{name} is now kvkeep\.generate\.{new}"):
            getattr(host, name)
    with pytest.raises(AttributeError, match=r"kvkeep\.generate\.stream"):
        host_of(model).generate(Letters(), PROMPT)
