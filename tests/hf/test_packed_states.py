"""Recurrent states in packed forwards: rows of one tensor, and undone if a forward fails."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from support.sweep_configs import model_of

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.generate import Batch, SamplingParams
from kvkeep.hf.kinds import recurrent
from kvkeep.host import Piece, host_of

pytestmark = pytest.mark.usefixtures("without_gradients", "one_thread")


@pytest.fixture(scope="module")
def model():
    found = model_of("qwen3_next")
    with kvkeep.attach(found):
        yield found


@pytest.fixture
def host(model):
    return host_of(model)


def tokens(n):
    return torch.randint(3, 60, (n,))


def step(host, caches, counts=None):
    """The pieces of a forward, of one token each or so many, and its logits."""
    pieces = [Piece(tokens(n), x) for x, n in zip(caches, counts or [1] * len(caches), strict=True)]
    return pieces, host.forward_packed(pieces)


def sequences(host, count=3):
    """Caches whose states are rows."""
    caches = [host.new_cache() for _ in range(count)]
    step(host, caches, range(4, 4 + count))
    step(host, caches)
    return caches


def storages(cache):
    return [x.untyped_storage().data_ptr() for x in cache.carried.tensors().values()]


def contents(caches):
    return [{n: x.clone() for n, x in one.carried.tensors().items()} for one in caches]


def same(caches, before):
    return all(
        one.carried.tensors().keys() == held.keys()
        and all(x.equal(held[name]) for name, x in one.carried.tensors().items())
        for one, held in zip(caches, before, strict=True)
    )


def test_states_stay_in_place_while_the_sequences_are_the_same(host):
    caches = sequences(host)
    before = [storages(one) for one in caches]
    assert before[0] == before[1] == before[2]
    step(host, caches)
    assert [storages(one) for one in caches] == before
    step(host, caches[1:])
    assert storages(caches[1]) == storages(caches[2]) != before[1]
    assert storages(caches[0]) == before[0]


def test_a_sequence_goes_on_by_itself_from_wherever_it_is_taken(host):
    """Forks, copies, snapshots and marks hold a row of their own, whatever the others do."""
    caches = sequences(host)
    one = caches[1]
    one.mark()
    taken = {
        "fork": one.freeze().fork(),
        "copied": deepcopy(one),
        "pickled": pickle.loads(pickle.dumps(one)),
        "restored": host.new_cache(),
    }
    taken["restored"].restore(one.snapshot())
    ids = tokens(2)
    expected = host.forward(ids[None], one.freeze().fork())
    step(host, caches)
    one.crop(-1)
    for name, cache in {**taken, "cropped": one}.items():
        assert host.forward(ids[None], cache).equal(expected), name
    assert len(pickle.dumps(one.carried)) < 2 * one.carried.nbytes + one.carried.marked_bytes + 4000


def failing(module, fails):
    """Let a module raise, after it has run."""
    return module.register_forward_hook(fails)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "name"), [(0, "linear_attn"), (2, "linear_attn"), (3, "mlp")])
def test_a_failed_forward_leaves_all_states_as_they_were(model, host, error, place, name):
    """At a layer that is recurrent, the first or a later one, and at the end; with a new sequence,
    chunks, and single tokens."""
    caches = [*sequences(host), host.new_cache()]
    before, fed = contents(caches), [one.fed for one in caches]
    counts = [1, 3, 1, 2]

    def fails(*_):
        raise error

    with failing(model.model.layers[place].get_submodule(name), fails), pytest.raises(error):
        step(host, caches, counts)
    assert same(caches, before)
    assert [one.fed for one in caches] == fed
    alone = [one.freeze().fork() for one in caches]
    pieces, found = step(host, caches, counts)
    expected = [
        host.forward(piece.ids[None], one)[:, -1] for piece, one in zip(pieces, alone, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_an_interrupted_batch_goes_on_as_if_nothing_had_happened(model):
    prompts = [tokens(n) for n in (5, 3, 9)]

    def texts(interrupted):
        batch = Batch(model, chunk=4)
        answers = [batch.add(prompt, SamplingParams(6))[0] for prompt in prompts]
        for turn in range(50):
            if turn in interrupted:
                with failing(model.model.layers[2], raises), pytest.raises(KeyboardInterrupt):
                    batch.step()
            if all(answer.ended for answer in answers):
                break
            batch.step()
        return [answer.tokens for answer in answers]

    def raises(*_):
        raise KeyboardInterrupt

    assert texts({0, 1, 3, 4}) == texts(())


def test_prompts_of_a_batch_leave_marks_for_the_store(model):
    store = kvkeep.PrefixStore(block=4)
    batch = Batch(model, chunk=4, store=store)
    prompt = tokens(13)
    added = [batch.add(x, SamplingParams(3))[0] for x in (prompt, tokens(6))]
    list(batch)
    (again,) = batch.add(torch.cat([prompt[:9], tokens(3)]), SamplingParams(3))
    list(batch)
    assert again.cached == 8
    assert all(len(answer.tokens) == 3 for answer in (*added, again))


def test_layers_that_attend_and_are_recurrent_are_fed_one_by_one(monkeypatch):
    monkeypatch.setattr(recurrent, "recurrent_layers", lambda decoder: ((), False))
    model = model_of("lfm2")
    with kvkeep.attach(model):
        host = host_of(model)
        assert "recurrent layers that also attend" in host.unpackable
        with pytest.raises(UnsupportedError, match="also attend"):
            step(host, [host.new_cache()])
        batch = Batch(model)
        answers = [batch.add(tokens(n), SamplingParams(2))[0] for n in (4, 3)]
        list(batch)
        assert [len(answer.tokens) for answer in answers] == [2, 2]
