"""Tensors that wait in memory or in a file come back as they were, and give up their room."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from support.autograd_gradients import gradients, texts
from support.tiny_models import tiny

import kvkeep
from kvkeep.files.offload import Kept, Offload, Spilled
from kvkeep.train import backward

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)


@pytest.mark.parametrize("host_bytes", [0, 10**9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comes_back(dtype, host_bytes):
    store = Offload(host_bytes)
    x = (torch.randn(3, 5, 7) * 100).to(dtype).transpose(0, 2)
    kept = store.put(x)
    assert store.get(kept).equal(x)
    assert store.get(kept).dtype == dtype
    count = x.numel() * x.element_size()
    assert (store.host_bytes, store.file_bytes) == ((0, count) if host_bytes == 0 else (count, 0))
    assert store.take(kept).equal(x)
    assert (store.host_bytes, store.file_bytes, store.peak_bytes) == (0, 0, count)
    store.close()


def test_a_view_does_not_keep_what_it_is_of():
    store = Offload(10**9)
    whole = torch.zeros(1000, 8)
    kept = store.put(whole[:2])
    assert store.get(kept).untyped_storage().nbytes() == 2 * 8 * 4
    whole[:2] = 1
    assert not store.get(kept).any()


def test_beyond_the_limit_a_file_is_used_and_its_gaps_again():
    store = Offload(1000)
    kept = [store.put(torch.full((100,), float(i))) for i in range(5)]
    assert [isinstance(k.place, Spilled) for k in kept] == [False, False, True, True, True]
    store.drop(kept[3])
    again = store.put(torch.full((100,), 9.0))
    assert again.place.offset == kept[3].place.offset
    for i, k in enumerate(kept):
        if i != 3:
            assert store.get(k)[0] == i
    assert store.get(again)[0] == 9
    store.close()


def test_nested_tensors_are_kept_once():
    store = Offload(0)
    x, mask = torch.randn(4), torch.ones(2, dtype=torch.int32)
    mask.tag = "seen"
    kept = store.put_tree([(x, {"a": x}), mask, None, 3], {})
    assert isinstance(kept[0][0], Kept)
    assert store.file_bytes == 16
    back = store.get_tree(kept)
    assert back[0][0].equal(x)
    assert back[0][1]["a"].equal(x)
    assert back[1] is mask
    assert back[2:] == [None, 3]
    store.close()


def test_a_full_disk_is_reported_with_the_remedy(monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    model = tiny("llama")
    ids, labels, _ = texts(1, 20)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(kvkeep.StateError, match=r"no room for \d+ bytes.*spill directory"):
        backward(model, ids, labels, chunk=8, offload=Offload(0))
    assert all(p.grad is None for p in model.parameters())


def test_a_directory_that_does_not_exist(tmp_path):
    with pytest.raises(kvkeep.StateError, match="nowhere"):
        Offload(0, str(tmp_path / "nowhere")).put(torch.zeros(3))


@pytest.mark.parametrize("spec", ["keep_all", "h2o:8+int8", "keep_all+kivi:4,together=4,recent=2"])
def test_gradients_do_not_depend_on_where_layer_inputs_wait(spec, tmp_path):
    model = tiny("llama")
    ids, labels, _ = texts(2, 40)
    found = []
    for host_bytes in (10**9, 20_000, 0):
        backward(
            model, ids, labels, cache=spec, chunk=8, offload=Offload(host_bytes, str(tmp_path))
        )
        found.append(gradients(model))
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
    assert not list(tmp_path.iterdir())


def test_holds_layer_inputs_and_gives_them_back():
    model = tiny("llama")
    ids, labels, _ = texts(2, 40)
    store = Offload(0)
    for _ in range(2):  # it can be used again
        backward(model, ids, labels, cache="h2o:8", chunk=8, offload=store)
        inputs = 3 * ids.numel() * model.config.hidden_size * 4  # of two layers, and of the head
        assert inputs < store.peak_bytes < 2 * inputs
        assert store.host_bytes == store.file_bytes == 0


def test_layer_inputs_are_given_up_as_they_are_used():
    """When the last layer inputs are read, nothing waits but what layers are called with."""
    model = tiny("llama")
    ids, labels, _ = texts(2, 40)
    store, left = Offload(10**9), []
    drop = store.drop
    store.drop = lambda kept: (drop(kept), left.append(store.host_bytes))
    backward(model, ids, labels, cache="h2o:8", chunk=8, offload=store)
    rotary = 2 * 40 * (model.config.hidden_size // model.config.num_attention_heads) * 4
    assert left[-1] == rotary
