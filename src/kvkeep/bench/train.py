"""One gradient of a long text: time and memory compared with backprop and checkpointing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvkeep.bench.environment import environment
from kvkeep.bench.resident import (
    alone,
    bounded,
    is_out_of_memory,
    peak,
    require_counters,
    reset_peak,
    resident,
)
from kvkeep.bench.text import tokens_of_text
from kvkeep.bench.unrolled import unrolled
from kvkeep.errors import ShapeError, SpecError
from kvkeep.files.offload import Offload
from kvkeep.hf.config import decoder_config
from kvkeep.hf.models import load
from kvkeep.spec import CacheSpec, PerType, parse_specs
from kvkeep.train import backward

KVKEEP, BACKPROP, CHECKPOINTING = METHODS = ("kvkeep", "backprop", "checkpointing")

_WARM_UP = 64
_DECISIONS = "decisions.safetensors"


def run(
    model: str = "smollm2-135m",
    *,
    tokens: Sequence[int] = (2048, 4096, 8192),
    methods: Sequence[str] = METHODS,
    cache: str = "h2o:1024",
    chunk: int = 1024,
    check: bool = True,
    memory: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compute the gradient of the next-token loss with respect to all weights, without dropout, for
    each method in a process of its own.

    Args:
        model: a name from `kvkeep models`, a directory, or a hub name; run in float32.
        tokens: lengths of the text.
        methods: "kvkeep", "backprop", "checkpointing" (transformers').
        cache, chunk: see `kvkeep.train.backward`.
        check: compare the gradients with another method's.
        memory: bytes that a gradient may take; None: the available memory minus one GiB.

    Returns:
        `rows`: for each length and method `peak_bytes`, the peak of resident memory above the model
        during the computation; `seconds`; and `grad_rel_error`, the norm of the difference from the
        reference divided by the reference's. A value is None if the method did not fit in memory or
        has no reference. Backprop and checkpointing are each other's reference; kvkeep's is plain
        autograd through the same cache with the same evictions. `offloaded_bytes` are kvkeep's
        layer inputs, which are kept in a file and not counted in the peak.

    Raises:
        SpecError: a method or cache does not exist.
        ShapeError: a text has fewer than two tokens.
        UnsupportedError: the system is not Linux, whose counters this reads.
    """
    for method in methods:
        if method not in METHODS:
            raise SpecError(f"no method {method!r} to measure; there is {', '.join(METHODS)}")
    if min(tokens) < 2:
        raise ShapeError(f"a text of {min(tokens)} tokens has no next token; give at least 2")
    parse_specs(cache)
    require_counters()
    rows = []
    for length in tokens:
        with TemporaryDirectory() as folder:
            job = _Job(model, length, cache, chunk, memory, folder if check else None)
            rows += _rows(job, methods, progress or (lambda _: None))
    return {
        "benchmark": "train",
        "model": model,
        "dtype": "float32",
        "cache": str(parse_specs(cache)),
        "chunk": chunk,
        "environment": environment(),
        "rows": rows,
    }


class _Job(NamedTuple):
    """The parameters of one length, for every method."""

    model: str
    tokens: int
    cache: str
    chunk: int
    memory: int | None
    folder: str | None
    """Directory for the gradients; None: they are not saved."""

    def gradients(self, method: str) -> Path:
        assert self.folder is not None
        return Path(self.folder) / f"{method}.safetensors"


def _rows(
    job: _Job, methods: Sequence[str], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    found = {}
    for method in methods:
        progress(f"{method}, {job.tokens} tokens")
        found[method] = _if_it_fits(_measure, method, job)
    fits = {method for method, measured in found.items() if measured is not None}
    references = {BACKPROP: CHECKPOINTING, CHECKPOINTING: BACKPROP}
    if job.folder is not None and KVKEEP in fits:
        references[KVKEEP] = BACKPROP
        if not (_is_exact(job.cache) and BACKPROP in fits):
            progress(f"reference, {job.tokens} tokens")
            references[KVKEEP] = "unrolled"
            if _if_it_fits(_reference, job):
                fits.add("unrolled")
    rows = []
    for method in found:
        measured = found[method] or dict.fromkeys(("peak_bytes", "seconds", "offloaded_bytes"))
        error, reference = None, references.get(method)
        if job.folder is not None and {method, reference} <= fits:
            error = _relative_error(job.gradients(method), job.gradients(str(reference)))
        rows.append(
            {
                "method": method,
                "tokens": job.tokens,
                "peak_bytes": measured["peak_bytes"],
                "seconds": measured["seconds"],
                "grad_rel_error": error,
                "offloaded_bytes": measured["offloaded_bytes"] if method == KVKEEP else 0,
            }
        )
    return rows


def _if_it_fits(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in another process; None if that process was killed."""
    try:
        return alone(function, *args)
    except BrokenProcessPool:
        return None


def _measure(method: str, job: _Job) -> dict[str, Any] | None:
    model, tokenizer = _loaded(job.model)
    if method == CHECKPOINTING:
        # Newer versions of transformers have renamed this method.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    text = tokens_of_text(tokenizer, max(job.tokens, _WARM_UP))
    short = job._replace(chunk=min(job.chunk, _WARM_UP // 2))
    _differentiate(method, model, text[:, :_WARM_UP], short)  # warm-up, not counted
    model.zero_grad(set_to_none=True)
    before = resident()
    reset_peak()
    try:
        with bounded(job.memory):
            start = time.perf_counter()
            offloaded, decisions = _differentiate(method, model, text[:, : job.tokens], job)
            seconds = time.perf_counter() - start
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
    most = peak() - before
    if job.folder is not None:
        _save(model, job.gradients(method))
        if method == KVKEEP:
            calls = {f"{i}.{n}": x for i, one in enumerate(decisions) for n, x in enumerate(one)}
            save_file(calls, Path(job.folder) / _DECISIONS)
    return {"peak_bytes": most, "seconds": seconds, "offloaded_bytes": offloaded}


def _reference(job: _Job) -> bool:
    """Compute and save kvkeep's gradients by plain autograd; returns whether they fit in memory."""
    assert job.folder is not None
    model, tokenizer = _loaded(job.model)
    ids = tokens_of_text(tokenizer, job.tokens)
    calls = load_file(Path(job.folder) / _DECISIONS)
    decisions: list[list[Tensor]] = [
        [] for _ in range(decoder_config(model.config).num_hidden_layers)
    ]
    for name in sorted(calls, key=lambda name: int(name.partition(".")[2])):
        decisions[int(name.partition(".")[0])].append(calls[name])
    try:
        with bounded(job.memory):
            unrolled(model, ids, job.cache, job.chunk, decisions)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    _save(model, job.gradients("unrolled"))
    return True


def _differentiate(method: str, model: Any, ids: Tensor, job: _Job) -> tuple[int, Any]:
    """Compute the gradients; returns the bytes that were offloaded and the evictions."""
    if method != KVKEEP:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return 0, []
    decisions: list[list[Tensor]] = []
    offload = Offload(0)
    backward(
        model,
        ids,
        ids,
        cache=job.cache,
        chunk=job.chunk,
        decisions=decisions,
        offload=offload,
    )
    return offload.peak_bytes, decisions


def _loaded(name: str) -> tuple[Any, Any]:
    """A model in training mode without dropout, and its tokenizer."""
    model, tokenizer = load(name, "float32", "cpu")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model.train(), tokenizer


def _is_exact(cache: str) -> bool:
    """Whether gradients through this cache equal those of full attention."""
    specs = parse_specs(cache)
    each = specs.values() if isinstance(specs, PerType) else [specs]
    exact = CacheSpec.parse("keep_all")
    return all(spec == replace(exact, storage=spec.storage) for spec in each)


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
