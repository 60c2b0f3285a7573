"""Gradients of texts that processes share; in a module that those processes can import."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from kvkeep.errors import KVKeepError, ShapeError
from kvkeep.files.offload import Offload
from kvkeep.train import backward, loss
from support import sweep_configs
from support.autograd_gradients import adapted, gradients, model_of, texts
from support.process_group import join, start

TOKENS, CHUNK = 23, 6  # four chunks, the last of them shorter

# Each kind of slots, of state and of decision that one process hands to the next.
SPECS = {
    "exact": "keep_all",
    "reach": "window:9,sinks=2",
    "mass and codes": "qh2o:8+int8",
    "state of rows": "expected_attention:8",
    "heads of different lengths": "adakv(snapkv:8,window=4)",
    "blocks": "keep_all+kivi:4",
}
CASES = [
    *SPECS,
    "padding",
    "the last layer",
    "windows and a head",
    "dropout",
    "fewer chunks",
    "accumulated",
    "states",
    "shared keys",
]


def found(case: str, group: dist.ProcessGroup | None):
    """The loss and the gradients of a case."""
    model, spec, chunk, head = model_of("llama"), SPECS.get(case, "h2o:8"), CHUNK, None
    ids, labels, mask = texts(2, TOKENS)
    if case == "padding":
        ids, labels, mask = texts(3, TOKENS, pads=(14, 3, 0))
    if case == "windows and a head":
        model, labels = model_of("gemma3"), None
        head = Head()
    if case == "states":
        model, spec = sweep_configs.few_layers("qwen3_5_text").double(), "h2o:8"
    if case == "shared keys":
        model, spec = model_of("gemma3n"), "h2o:8"
    if case == "dropout":
        model = adapted(model, lora_dropout=0.3).train()
        torch.manual_seed(7 if group is None else 7 + dist.get_rank(group))
    if case == "the last layer":
        model.requires_grad_(False).model.layers[-1].requires_grad_(True)
    if case == "fewer chunks":
        chunk, spec = TOKENS, "keep_all"
    way = {"cache": spec, "chunk": chunk, "attention_mask": mask, "head": head, "group": group}
    value = backward(model, ids, labels, **way)
    if case == "accumulated":
        backward(model, ids.flip(1), labels.flip(1), **way)
    if case != "dropout":
        torch.testing.assert_close(loss(model, ids, labels, **way), value)
    both = torch.nn.ModuleList([model, head]) if head is not None else model
    return value, gradients(both)


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64))

    def forward(self, hidden, columns):
        return (hidden @ self.weight).square().sum()


def refused(group: dist.ProcessGroup) -> str:
    """What is raised in this process when one chunk's loss is not finite; no gradient changes."""
    model = model_of("llama")
    ids, labels, _ = texts(2, TOKENS)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    weights = torch.ones(ids.shape)
    weights[0, -1] = torch.nan  # in the last process's chunks
    way = {"chunk": CHUNK, "num_items": 1.0, "group": group}
    with pytest.raises(KVKeepError, match="the loss is nan in chunk") as raised:
        backward(model, ids, labels, loss_weights=weights, **way)
    assert bool((gradients(model)[-10:] == 1).all())
    with pytest.raises(ShapeError, match="were given different texts"):
        backward(model, ids + dist.get_rank(group), labels, **way)
    return type(raised.value).__name__


def kept(group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """The first columns of the chunks that a process computes, and the bytes that it keeps."""
    ids, labels, _ = texts(2, TOKENS)
    seen, offload = [], Offload()
    way = {"cache": "h2o:8", "chunk": CHUNK, "group": group, "offload": offload}
    backward(model_of("llama"), ids, labels, on_layer=lambda i, x, at: seen.append(at.start), **way)
    return sorted(set(seen)), offload.peak_bytes


def work(rank: int, processes: int, path: str, cases: list[str]) -> None:
    join(rank, processes, path)
    group = dist.group.WORLD
    results = {case: found(case, group) for case in cases}
    torch.save((results, refused(group), kept(group)), f"{path}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # see distributed_gradient.py


def run(processes: int, path: str, cases: list[str]):
    """What each process found."""
    start(work, processes, processes, path, cases)
    return [torch.load(f"{path}/{rank}.pt", weights_only=True) for rank in range(processes)]
