"""Calls that are answered at once, by one batch."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from itertools import pairwise
from threading import Event, Thread

import pytest
from mellea.backends import ModelOption
from mellea.backends.huggingface import LocalHFBackend
from mellea.core import CBlock
from mellea.stdlib.components import Instruction, Message
from mellea.stdlib.context import SimpleContext
from mellea.stdlib.functional import aact
from pydantic import BaseModel
from support.lighthouse import DOCUMENTS, OPTIONS, QUESTION, ask, marked, prompt_of

from kvkeep.errors import ShapeError
from kvkeep.mellea import KVKeepBackend, report_of
from kvkeep.mellea.together import FairLock

NAMES = list(DOCUMENTS)


@pytest.fixture
def backend(model, tokenizer):
    with KVKeepBackend(model, tokenizer, sequences=3, model_options=OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def plain(model, tokenizer):
    """Mellea's own backend."""
    return LocalHFBackend("x", custom_config=(tokenizer, deepcopy(model), model.device))


@pytest.fixture
def running(backend):
    """How many answers were at work in each step."""
    found, batch = [], backend._together._batch
    step = batch.step

    def counted():
        result = step()
        found.append(batch.running)
        return result

    batch.step = counted
    return found


def at_once(backend, actions, **options):
    """The answers to some actions, all asked for before the first is given."""

    async def together():
        calls = [
            aact(action, SimpleContext(), backend, strategy=None, **options) for action in actions
        ]
        answers = [answer for answer, _ in await asyncio.gather(*calls)]
        await asyncio.gather(*(answer.avalue() for answer in answers))
        return answers

    return asyncio.run(together())


def questions(*names, cache=True):
    return [Instruction(QUESTION, grounding_context=marked(n, cache=cache)) for n in names]


@pytest.mark.parametrize("size", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_each_gets_its_own_answer(model, tokenizer, request, size):
    """As if they were asked one after the other, with the blocks and the report of each."""
    if size == "real":
        model, tokenizer = request.getfixturevalue("smollm2")
    options = OPTIONS | {ModelOption.MAX_NEW_TOKENS: 8}
    with KVKeepBackend(model, tokenizer, recompute="all", model_options=options) as backend:
        wanted = [str(ask(backend, name)) for name in NAMES]
    with KVKeepBackend(
        model, tokenizer, recompute="all", sequences=3, model_options=options
    ) as backend:
        answers = at_once(backend, questions(*NAMES, *NAMES))
        assert [str(answer) for answer in answers] == wanted * 2
        for answer, name in zip(answers, NAMES * 2, strict=True):
            assert [block.text for block in report_of(answer).blocks] == [DOCUMENTS[name][:40]]
            assert answer.generation.finish_reasons == ["length"]
            usage = answer.generation.usage
            assert usage["prompt_tokens"] == report_of(answer).tokens + 1
        backend.store.check()


def test_they_are_computed_together(backend, running):
    options = {ModelOption.MAX_NEW_TOKENS: 24}
    at_once(backend, questions(*NAMES, *NAMES), model_options=options)
    assert max(running) > 1
    assert max(running) <= 3
    assert backend._together._batch.running == backend._together._batch.waiting == 0


def test_blocks_are_found(backend):
    at_once(backend, questions(*NAMES))
    actions = [Instruction(QUESTION, grounding_context=marked(a, b)) for a, b in pairwise(NAMES)]
    for answer in at_once(backend, actions):
        report = report_of(answer)
        assert report.cached >= sum(block.stop - block.start for block in report.blocks)
        assert not any(block.refused for block in report.blocks)


def test_several_prompts_without_a_template(backend, running, plain):
    """`generate_from_raw`: of different lengths, without padding, each by itself in the store."""
    actions = [CBlock(DOCUMENTS["storm"]), CBlock("Once."), CBlock(DOCUMENTS["built"], cache=True)]

    def read(backend):
        return asyncio.run(backend.generate_from_raw(actions, SimpleContext()))

    wanted = []
    for action in actions:
        answers = asyncio.run(
            plain.generate_from_raw([action], SimpleContext(), model_options=OPTIONS)
        )
        wanted += map(str, answers)
    first, second = read(backend), read(backend)
    assert [str(answer) for answer in first] == [str(answer) for answer in second] == wanted
    assert max(running) == 3
    assert [report_of(answer).exact for answer in first] == [0, 0, 0]
    for answer in second:
        assert report_of(answer).exact == report_of(answer).tokens > 0
        details = answer.generation.usage["prompt_tokens_details"]
        assert details == {"cached_tokens": report_of(answer).exact}
    assert not report_of(first[2]).blocks[0].refused


class Short(BaseModel):
    built: bool


def test_structured_answers(backend):
    """Each has a grammar's state of its own."""
    options = {ModelOption.MAX_NEW_TOKENS: 8}
    actions = [CBlock("Once."), CBlock(DOCUMENTS["storm"])]
    for answer in asyncio.run(
        backend.generate_from_raw(actions, SimpleContext(), format=Short, model_options=options)
    ):
        assert str(answer).startswith("{")
        assert str(answer).split() != ["{"]


def test_stream(backend):
    action = Message("user", QUESTION)
    (wanted,) = at_once(backend, [action])

    async def streamed():
        options = {ModelOption.STREAM: True}
        answer, _ = await aact(
            action, SimpleContext(), backend, strategy=None, model_options=options
        )
        return [piece async for piece in answer], answer

    pieces, answer = asyncio.run(streamed())
    assert "".join(pieces) == str(answer) == str(wanted)
    assert report_of(answer).exact > 0


def test_a_stream_that_is_cancelled(backend):
    """It ends after the token that is being computed, and frees its slots."""

    async def cancelled():
        options = {ModelOption.STREAM: True, ModelOption.MAX_NEW_TOKENS: 600}
        answer, _ = await aact(
            Message("user", QUESTION),
            SimpleContext(),
            backend,
            strategy=None,
            model_options=options,
        )
        await answer.astream()
        await answer.cancel_generation()

    asyncio.run(cancelled())
    (after,) = at_once(backend, [Message("user", "Is it cold?")])
    assert report_of(after).tokens > 0
    assert backend._together._batch.running == 0


def test_closing_waits_for_all(backend):
    actions = questions(*NAMES, cache=False)
    wanted = list(map(str, at_once(backend, actions)))

    async def closed():
        calls = [aact(action, SimpleContext(), backend, strategy=None) for action in actions]
        answers = [answer for answer, _ in await asyncio.gather(*calls)]
        while not backend._together._listeners:
            await asyncio.sleep(0.001)
        await backend.aclose()
        return [await answer.avalue() for answer in answers]

    assert asyncio.run(closed()) == wanted
    assert backend._closed


def test_seeds_and_temperature(backend):
    def drawn(seed):
        options = {ModelOption.SEED: seed, ModelOption.TEMPERATURE: 2.0, "do_sample": True}
        return [str(a) for a in at_once(backend, questions(*NAMES[:2]), model_options=options)]

    assert drawn(3) == drawn(3) != drawn(4)


def test_what_ends_an_answer(backend):
    """A stop string is its end, as in `generate`, and so is a token that the call names."""

    def answered(**options):
        answer = ask(backend, "built", cache=False, model_options=options)
        return answer, answer.raw.response.sequences[0, len(prompt_of(answer)) :]

    _, said = answered()
    stop = backend._tokenizer.decode(said[:3])[-3:]
    answer, tokens = answered(**{ModelOption.STOP_SEQUENCES: [stop]})
    assert str(answer).endswith(stop)
    assert answer.generation.finish_reasons == ["stop"]
    assert tokens.equal(said[:3])
    _, tokens = answered(eos_token_id=int(said[1]))
    assert tokens.equal(said[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {ModelOption.RAW_LOGITS: True},
        {"no_repeat_ngram_size": 2},
    ],
    ids=["beams", "logits", "ngrams"],
)
def test_what_only_generate_does(backend, running, plain, options):
    wanted = ask(plain, "built", cache=False, model_options=OPTIONS | options)
    assert str(ask(backend, "built", cache=False, model_options=options)) == str(wanted)
    assert running == []


def test_repetition_penalty(backend, running):
    plain = ask(backend, "built", cache=False)
    token = int(plain.raw.response.sequences[0, len(prompt_of(plain))])
    assert running
    again = f"{QUESTION} {backend._tokenizer.decode([token])}"
    before = ask(backend, question=again)
    after = ask(backend, question=again, model_options={"repetition_penalty": 50.0})
    said = after.raw.response.sequences[0]
    new = said[len(prompt_of(after)) :].tolist()
    assert not set(new) & set(prompt_of(after).tolist())
    assert str(before)


def test_the_error_of_one(backend):
    """It is raised where its answer is awaited; the others go on."""

    def fail(ids, scores):
        raise ValueError("no such token")

    async def answered(action, **options):
        answer, _ = await aact(
            action, SimpleContext(), backend, strategy=None, model_options=options
        )
        return await answer.avalue()

    async def together():
        good, bad = questions("built", "green")
        calls = answered(good), answered(bad, logits_processor=[fail])
        return await asyncio.gather(*calls, return_exceptions=True)

    good, bad = asyncio.run(together())
    assert good
    assert isinstance(bad, ValueError)
    assert "no such token" in str(bad)
    with pytest.raises(ShapeError, match="lower max_new_tokens"):
        ask(backend, model_options={ModelOption.MAX_NEW_TOKENS: 5000})
    assert str(ask(backend, "built"))


def test_a_lock_that_leaves_others_their_turn():
    """Another thread gets it next, though the first asks for it again at once."""
    lock, order, waiting = FairLock(), [], Event()

    def second():
        waiting.set()
        with lock:
            order.append("second")

    thread = Thread(target=second)
    with lock, lock:
        thread.start()
        waiting.wait()
        while not lock._waiting:
            pass
        order.append("first")
    with lock:
        order.append("first again")
    thread.join()
    assert order == ["first", "second", "first again"]
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with lock:
        pass
