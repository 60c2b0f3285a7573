"""A gradient by two processes, each with one of two texts; in a module that they can import."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from kvkeep.errors import StateError
from kvkeep.train import backward, loss
from support.autograd_gradients import texts
from support.process_group import join, start
from support.tiny_models import tiny

SPEC, CHUNK, TOKENS = "h2o:8", 7, 40
ROWS = 2  # one for each process


def model_of(tied):
    return tiny("llama", tie_word_embeddings=tied).double()


def batch():
    return texts(ROWS, TOKENS, pads=(5, 0))


def work(rank: int, way: str, tied: bool, path: str) -> None:
    join(rank, ROWS, path)
    model = model_of(tied)
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (ROWS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(StateError, match="sharded over the processes that share the text"):
            backward(model, *batch()[:2], group=dist.group.WORLD)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    ids, labels, mask = (x[rank : rank + 1] for x in batch())
    counted = (batch()[1][:, 1:] != -100).sum() / ROWS  # for gradients are averaged
    way_through = {"cache": SPEC, "chunk": CHUNK, "attention_mask": mask, "num_items": counted}
    found = []
    for _ in range(2):  # the second call adds to the gradients of the first
        value = backward(model, ids, labels, **way_through)
        found.append({name: full(p.grad) for name, p in model.named_parameters()})
    assert torch.isclose(loss(model, ids, labels, **way_through), value)
    dist.all_reduce(value)
    if rank == 0:
        torch.save((value / ROWS, found), f"{path}/found.pt")
    # Gloo's thread may still hold a tensor, for which it needs Python's lock, when Python waits for
    # that thread while it frees the group: so nothing is freed.
    os._exit(0)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x.clone()


def run(way: str, tied: bool, path: str):
    """The loss, and the gradients by name after one call and after two."""
    start(work, ROWS, way, tied, path)
    return torch.load(f"{path}/found.pt", weights_only=True)
