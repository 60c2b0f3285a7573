"""One gradient of a long text: time and memory compared with backprop and checkpointing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kvkeep.errors import ShapeError
from kvkeep.files.offload import Offload
from kvkeep.hf.models import load
from kvkeep.host import host_of
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.host.registry import require_host
from kvkeep.spec import parse_specs
from kvkeep.train import backward, replaying
from kvkeep.train.replay import Decisions
from kvkeep_lab.bench.options import METHODS, Train
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.resident import (
    bounded,
    peak,
    require_counters,
    reset_peak,
    resident,
    together,
)
from kvkeep_lab.bench.systems import LITGPT
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.checks import require_known

KVKEEP, _, CHECKPOINTING = METHODS

_WARM_UP = 64
_MEASURED = ("peak_bytes", "seconds", "offloaded_bytes")


def run(asked: Train, progress: Progress = silent) -> dict[str, Any]:
    """Compute the gradient of the next-token loss with respect to all weights, without dropout, for
    each method in a process of its own; of kvkeep's method for each number of processes that share
    a text, and divide the threads. The model is run in float32.

    Returns:
        `rows`: for each length, method and number of processes `peak_bytes`, the peak of resident
        memory above the model during the computation, in the process where it is greatest;
        `seconds`; and kvkeep's `grad_rel_error`, the norm of the difference from plain autograd's
        gradients through the same cache with the same evictions, divided by the norm of these. A
        value is None if the method, or plain autograd, did not fit in memory. `offloaded_bytes` are
        kvkeep's layer inputs, which are kept in a file and not counted in the peak; of the process
        with the most.

    Raises:
        SpecError: a method, host or cache does not exist.
        ShapeError: a text is longer than the standard library's help texts.
        UnsupportedError: the system is not Linux, whose counters this reads, or LitGPT is not
            installed.
    """
    processes, tokens = asked.processes, asked.tokens
    require_known("method", asked.methods, METHODS)
    require_host(asked.host)
    spec = str(parse_specs(asked.cache))
    require_counters()
    ways = [(one, n) for one in asked.methods for n in (processes if one == KVKEEP else (1,))]
    rows, work = [], Work(progress, (len(ways) + asked.check) * sum(tokens))
    for length in tokens:
        with TemporaryDirectory() as folder:
            rows += _rows(_Job(asked, length, asked.chunk, folder), ways, work)
    about = {"dtype": "float32", "host": asked.host, "cache": spec, "chunk": asked.chunk}
    return result("train", rows, model=asked.model, **about)


class _Job(NamedTuple):
    """One length, for every method."""

    asked: Train
    tokens: int
    chunk: int
    folder: str
    """Directory for the gradients."""

    def gradients(self, processes: int) -> Path:
        """The file of kvkeep's gradients; of 0 processes: the reference's."""
        return Path(self.folder) / f"gradients-of-{processes}.safetensors"

    def decisions(self, rank: int, processes: int) -> Path:
        return Path(self.folder) / f"decisions-{rank}-of-{processes}.safetensors"


def _rows(job: _Job, ways: Sequence[tuple[str, int]], work: Work) -> list[dict[str, Any]]:
    found = {}
    for method, processes in ways:
        several = f", {processes} processes" if processes > 1 else ""
        work.stage(f"{method}, {job.tokens} tokens{several}", job.tokens)
        calls = [partial(_measure, method, job, rank, processes) for rank in range(processes)]
        found[method, processes] = _if_they_fit(calls)
    ours = [n for (method, n), measured in found.items() if method == KVKEEP and measured]
    compared = False
    if job.asked.check and ours:
        work.stage(f"reference, {job.tokens} tokens", job.tokens)
        compared = _if_they_fit([partial(_reference, job, min(ours))]) is not None
    rows = []
    for (method, processes), measured in found.items():
        error = None
        if compared and method == KVKEEP and measured:
            error = _relative_error(job.gradients(processes), job.gradients(0))
        most = {x: measured and max(one[x] for one in measured) for x in _MEASURED}
        offloaded = most.pop("offloaded_bytes") if method == KVKEEP else 0
        about = {"method": method, "processes": processes, "tokens": job.tokens}
        figures = {name: most[name] for name in _MEASURED[:2]} | {"grad_rel_error": error}
        rows.append(about | figures | {"offloaded_bytes": offloaded})
    return rows


def _if_they_fit(calls: Sequence[Callable[[], Any]]) -> list[Any] | None:
    """The results of functions that run at the same time, each in another process; None if memory
    did not suffice: a process was killed, or a function returned None or False."""
    try:
        found = together(calls)
    except BrokenProcessPool:
        return None
    return None if None in found or False in found else found


def _measure(method: str, job: _Job, rank: int, processes: int) -> dict[str, Any] | None:
    model, tokenizer = _loaded(job)
    group = _met(job, rank, processes) if processes > 1 else None
    if method == CHECKPOINTING:
        _checkpoint(model, job.asked.host)
    text = tokens_of_text(tokenizer, max(job.tokens, _WARM_UP))
    # Each process has a chunk, so that the weights of each are in memory before it is measured.
    short = job._replace(chunk=min(job.chunk, max(1, _WARM_UP // (2 * processes))))
    _differentiate(method, model, text[:, :_WARM_UP], short, group)  # warm-up, not counted
    model.zero_grad(set_to_none=True)
    before = resident()
    reset_peak()
    try:
        with bounded(job.asked.memory):
            start = time.perf_counter()
            offloaded, decisions = _differentiate(method, model, text[:, : job.tokens], job, group)
            seconds = time.perf_counter() - start
    except MemoryError:
        if group is not None:
            os._exit(1)  # or the other processes would wait for it
        return None
    most = peak() - before
    if job.asked.check and method == KVKEEP:
        calls = {f"{i}.{n}": x for i, one in enumerate(decisions) for n, x in enumerate(one)}
        save_file(calls, job.decisions(rank, processes))
        if not rank:
            _save(model, job.gradients(processes))
    return {"peak_bytes": most, "seconds": seconds, "offloaded_bytes": offloaded}


def _met(job: _Job, rank: int, processes: int) -> dist.ProcessGroup | None:
    """The group of the processes that share a text. A process has its share of the threads."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    place = f"file://{job.folder}/meet-{processes}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=processes)
    return dist.group.WORLD


def _reference(job: _Job, processes: int) -> bool:
    """Compute and save kvkeep's gradients by plain autograd, with the evictions that
    `processes` recorded, whose chunks follow each other; returns whether they fit in memory."""
    model, tokenizer = _loaded(job)
    ids = tokens_of_text(tokenizer, job.tokens)
    decisions: Decisions = [[] for _ in host_of(model).kinds]
    for rank in range(processes):
        calls = load_file(job.decisions(rank, processes))
        for name in sorted(calls, key=lambda name: int(name.partition(".")[2])):
            decisions[int(name.partition(".")[0])].append(calls[name])
    try:
        with bounded(job.asked.memory):
            _unrolled(model, ids, job.asked.cache, job.chunk, decisions)
    except MemoryError:
        return False
    _save(model, job.gradients(0))
    return True


def _unrolled(model: Any, ids: Tensor, cache: str, chunk: int, decisions: Decisions) -> None:
    """Accumulate the gradients of the mean next-token loss, in one graph of all chunks' forwards
    through a cache that repeats evictions."""
    host = host_of(model)
    with host.attach():
        held = replaying(model, cache, decisions)
        pieces = [host.forward(x, held, last=x.shape[1]) for x in torch.split(ids, chunk, dim=1)]
        logits = torch.cat(pieces, dim=1)
        torch.autograd.backward(cross_entropy(logits[0, :-1], ids[0, 1:]))


def _differentiate(
    method: str, model: Any, ids: Tensor, job: _Job, group: dist.ProcessGroup | None
) -> tuple[int, Any]:
    """Compute the gradients; returns the bytes that were offloaded and the evictions."""
    if method != KVKEEP:
        if job.asked.host == LITGPT:
            _litgpt().next_token_loss(model, ids).backward()
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return 0, []
    decisions, offload = Decisions(), Offload(0)
    how: dict[str, Any] = {"cache": job.asked.cache, "chunk": job.chunk, "group": group}
    backward(model, ids, ids, decisions=decisions, offload=offload, **how)
    return offload.peak_bytes, decisions


def _litgpt() -> Any:
    """The module of LitGPT's systems; LitGPT may not be installed."""
    return import_module("kvkeep_lab.bench.litgpt_systems")


def _checkpoint(model: Any, host: str) -> None:
    """Let a model keep each layer's input only, and compute the rest again."""
    if host == LITGPT:
        _litgpt().checkpoint(model)
        return
    # Newer versions of transformers have renamed this method.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _loaded(job: _Job) -> tuple[Any, Any]:
    """A model in training mode without dropout, and its tokenizer."""
    model, tokenizer = load(job.asked.model, "float32", "cpu")
    if job.asked.host == LITGPT:
        model = _litgpt().converted(model).requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model.train(), tokenizer


def _save(model: nn.Module, file: Path) -> None:
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    save_file({name: grad.contiguous() for name, grad in named if grad is not None}, file)


def _relative_error(found: Path, reference: Path) -> float:
    """The norm of the difference over all tensors, divided by the reference's norm."""
    difference = norm = 0.0
    with safe_open(found, "pt") as mine, safe_open(reference, "pt") as theirs:
        if set(mine.keys()) != set(theirs.keys()):
            raise ShapeError(f"{found.name} has gradients of other weights than {reference.name}")
        for name in theirs.keys():  # noqa: SIM118 - a file, not a mapping
            wanted = theirs.get_tensor(name).double()
            difference += float((mine.get_tensor(name).double() - wanted).square().sum())
            norm += float(wanted.square().sum())
    return float((difference / norm) ** 0.5)
