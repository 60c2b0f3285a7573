"""A cache serves one thread at a time, and refuses the second."""

from __future__ import annotations

import copy
import pickle
from threading import Event, Thread

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
import kvkeep.layer.step
from kvkeep import native_library
from kvkeep.errors import StateError
from kvkeep.layer.cursor import Turn
from kvkeep.layer.decode.ready import NOT_MADE
from kvkeep.spec import CacheSpec


def chunk(n=1):
    return torch.randn(1, 4, n, 8), *torch.randn(2, 1, 2, n, 8)


def meanwhile(hold, do):
    """Call `do` in this thread while another is inside of `hold(wait)`, which calls `wait`."""
    inside, go_on = Event(), Event()

    def wait():
        inside.set()
        assert go_on.wait(20)

    thread = Thread(target=hold, args=(wait,))
    thread.start()
    try:
        assert inside.wait(20)
        do()
    finally:
        go_on.set()
        thread.join()


def test_two_threads_in_one_layer(monkeypatch):
    layer = CacheSpec.parse("keep_all").layer()
    layer.step(*chunk(5), scale=0.4)
    attend = kvkeep.layer.step.dispatch

    def hold(wait):
        monkeypatch.setattr(kvkeep.layer.step, "dispatch", lambda *a: (wait(), attend(*a))[1])
        layer.step(*chunk(), scale=0.4)

    def other():
        monkeypatch.setattr(kvkeep.layer.step, "dispatch", attend)
        q, k, v = chunk()
        index = torch.tensor([0])
        for change in (
            lambda: layer.step(q, k, v, scale=0.4),
            lambda: layer.extend(k, v),
            lambda: layer.settle(),
            lambda: layer.crop(-1),
            lambda: layer.take_rows(index),
        ):
            with pytest.raises(StateError, match="one thread at a time"):
                change()

    meanwhile(hold, other)
    assert layer.fed == layer.length == 6
    layer.step(*chunk(), scale=0.4)
    assert layer.fed == layer.length == 7


@pytest.mark.parametrize("stop", [0, 1])
def test_two_threads_in_forwards_of_one_cache(stop):
    model = tiny("llama", num_hidden_layers=3)
    ids = torch.randint(2, 96, (1, 6))
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(ids, past_key_values=cache)
        expected = model(ids, past_key_values=copy.deepcopy(cache)).logits
        found = []

        def hold(wait):
            model.model.layers[stop].mlp.register_forward_hook(lambda *_: wait())
            with torch.no_grad():
                found.append(model(ids, past_key_values=cache).logits)

        def other():
            model.model.layers[stop].mlp._forward_hooks.clear()
            with pytest.raises(StateError, match="another thread's forward"):
                model(ids, past_key_values=cache)

        meanwhile(hold, other)
        assert found[0].equal(expected)
        assert cache.fed == cache.length == 12
        model(ids, past_key_values=cache)  # the other thread's forward has ended
        assert cache.fed == 18


def test_copies_are_free():
    turn = Turn()
    with turn, copy.deepcopy(turn), pickle.loads(pickle.dumps(turn)), turn:
        pass


def test_what_a_second_thread_is_refused_changes_nothing(monkeypatch):
    cache = kvkeep.cache.Cache([CacheSpec.parse("keep_all").layer() for _ in range(3)])
    for layer in cache.layers:
        layer.step(*chunk(5), scale=0.4)
    snapshot, attend = cache.snapshot(), kvkeep.layer.step.dispatch

    def hold(wait):
        monkeypatch.setattr(kvkeep.layer.step, "dispatch", lambda *a: (wait(), attend(*a))[1])
        cache.layers[1].step(*chunk(), scale=0.4)

    def other():
        monkeypatch.setattr(kvkeep.layer.step, "dispatch", attend)
        for change in (
            lambda: cache.crop(-2),
            lambda: cache.reorder([0]),
            lambda: cache.restore(snapshot),
            lambda: cache.freeze(),
            lambda: cache.snapshot(),
        ):
            with pytest.raises(StateError, match="one thread at a time"):
                change()

    meanwhile(hold, other)
    assert [layer.fed for layer in cache.layers] == [5, 6, 5]
    cache.rewind(5)
    cache.reorder([0])
    assert [layer.length for layer in cache.layers] == [5, 5, 5]


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
def test_a_prepared_step_of_a_layer_that_has_changed_since():
    layer = CacheSpec.parse("keep_all").layer()
    layer.step(*chunk(5), scale=0.4)
    layer.step(*chunk(), scale=0.4)
    ready = layer.prepare()
    layer.step(*chunk(), scale=0.4)
    with pytest.raises(StateError, match="another thread"):
        ready.begin()
    ready.end(NOT_MADE)
    layer.prepare().begin()  # its turn is free
