"""Batches and stores that let them wait: an answer waits for its store alone."""

from __future__ import annotations

import pytest
import torch
from support.held_backend import Held
from support.interruption import Interruption

from kvkeep import PrefixStore
from kvkeep.generate import Batch, SamplingParams, generate_many

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = 30  # tokens of the prompt that the backend holds


@pytest.fixture
def backend(model):
    """A backend that holds a prompt, and answers no more question."""
    held = Held()
    store = PrefixStore(backend=held, block=8)
    generate_many(model, [tokens(TEXT)], SamplingParams(2), store=store, progress=False)
    held.reads.clear()
    held.asked.clear()
    yield held
    held.let()


def tokens(n, seed=0):
    return torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(seed))


def alone(model, prompt, params):
    ((answer,),) = generate_many(model, [prompt], params, progress=False)
    return answer.tokens


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "window:40"])
@pytest.mark.parametrize("options", [{}, {"sequences": 1}])
def test_an_answer_waits_for_its_store_alone(model, backend, spec, options):
    if spec == "keep_all+int8":
        backend.let()
        store = PrefixStore(backend=backend, block=8)
        generate_many(
            model, [tokens(TEXT)], SamplingParams(1), store=store, spec=spec, progress=False
        )
        backend.reads.clear()
    batch = Batch(model, store=PrefixStore(backend=backend, block=8), spec=spec, **options)
    slow = batch.add(tokens(TEXT), SamplingParams(6), n=2)
    others = [batch.add(tokens(9, i), SamplingParams(5), namespace=None)[0] for i in (1, 2)]
    while not all(answer.ended for answer in others):
        batch.step()
    (late,) = batch.add(tokens(9, 3), SamplingParams(5), namespace=None)
    while not late.ended:
        batch.step()
    assert backend.asked.is_set()
    assert (batch.running, batch.waiting) == (0, 2)
    assert not any(answer.tokens for answer in slow)
    backend.let()
    list(batch)
    ((expected,),) = generate_many(
        model, [tokens(TEXT)], SamplingParams(6), spec=spec, progress=False
    )
    assert [answer.tokens for answer in slow] == [expected.tokens] * 2
    assert [answer.cached for answer in slow] == [TEXT - 1, 0]


def test_learning_waits_for_no_backend(model, backend):
    backend.reads.set()
    backend.writes.clear()
    store = PrefixStore(backend=backend, block=8)
    batch = Batch(model, store=store)
    (first,) = batch.add(tokens(20, 5), SamplingParams(6))
    list(batch)
    (same,) = batch.add(tokens(20, 5), SamplingParams(6))
    list(batch)
    assert (first.cached, same.cached, same.tokens) == (0, 19, first.tokens)
    other = PrefixStore(backend=backend, block=8)
    backend.let()
    store.flush()
    batch = Batch(model, store=other)
    (found,) = batch.add(tokens(20, 5), SamplingParams(6))
    list(batch)
    assert (found.cached, found.tokens) == (19, first.tokens)


def test_what_is_written_later_is_what_was_learned(model, backend):
    """Even if the store has no room for it, and the cache has gone on and evicted tokens."""
    backend.reads.set()
    backend.writes.clear()
    text = tokens(20, 6)
    store = PrefixStore(1, backend=backend, block=8)
    batch = Batch(model, store=store, spec="window:24")
    batch.add(text, SamplingParams(30))
    list(batch)
    assert store.nbytes == 0
    backend.let()
    store.flush()
    batch = Batch(model, store=PrefixStore(backend=backend, block=8))
    (found,) = batch.add(text, SamplingParams(6))
    list(batch)
    assert (found.cached, found.tokens) == (19, alone(model, text, SamplingParams(6)))


def test_generate_many_leaves_what_it_learned_in_the_backend(model):
    backend = Held()
    store = PrefixStore(backend=backend, block=8)
    generate_many(model, [tokens(20, 7)], SamplingParams(2), store=store, progress=False)
    assert len(list(backend.held.scan())) == 4  # the last both without and with the first new token


@pytest.mark.parametrize("at", [5, 50, 200])
def test_an_interrupt_while_a_store_is_asked(model, backend, at):
    batch = Batch(model, store=PrefixStore(backend=backend, block=8))
    (slow,) = batch.add(tokens(TEXT), SamplingParams(6))
    with Interruption(at) as interruption:
        batch.step()
    assert interruption.met
    batch.step()
    assert backend.asked.wait(60)
    backend.let()
    list(batch)
    assert (slow.cached, slow.tokens) == (TEXT - 1, alone(model, tokens(TEXT), SamplingParams(6)))


def test_a_cancelled_answer_waits_no_more(model, backend):
    batch = Batch(model, store=PrefixStore(backend=backend, block=8))
    (slow,) = batch.add(tokens(TEXT), SamplingParams(6))
    batch.step()
    slow.cancel()
    assert list(batch) == [slow]


def test_a_backend_that_raises_costs_nobody_an_answer(model, backend, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    backend.let()
    for method in ("leading", "missing"):
        monkeypatch.setattr(Held, method, broken)
    batch = Batch(model, store=PrefixStore(backend=backend, block=8))
    (answer,) = batch.add(tokens(TEXT), SamplingParams(6))
    list(batch)
    assert (answer.cached, answer.tokens) == (0, alone(model, tokens(TEXT), SamplingParams(6)))
