"""The options of a fine-tuning run, and whether they fit each other, the model and the data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from kvkeep.errors import KVKeepError
from kvkeep.host import Host, per_layer
from kvkeep.spec import parse_specs
from kvkeep.train.walk import fitting

LENGTH = 8192
TASKS = ("text", "classify")
DECAYS = ("linear", "cosine")

_LORA: dict[str, Any] = {"rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}
_LEAST = {
    "chunk": 1,
    "least_chunk": 1,
    "length": 2,
    "batch": 1,
    "accumulate": 1,
    "rank": 1,
    "alpha": 1,
    "warmup": 0,
    "clip": 0,
    "steps": 1,
    "epochs": 1,
    "eval_every": 0,
    "save_every": 0,
    "keep": 1,
    "context_parallel": 1,
}
_RATES = {False: 2e-4, True: 1e-5}
"""The default learning rates of an adapter, and of all weights."""

_BESIDE = {"eval_every", "save_every", "keep", "host_bytes", "spill", "offload", "context_parallel"}
"""Options that the trained weights do not depend on."""


class OptionError(KVKeepError, ValueError):
    """Options that do not fit each other, the data or the model."""


@dataclass(frozen=True)
class Options:
    """How to fine-tune.

    Attributes:
        task: what is learned, "text" (the next token) or "classify".
        cache: what is kept while training; use the spec that the model will be served with.
        chunk: tokens computed at once; None: 1,024, or the cache's budget or step if that is less.
        least_chunk: the least number of tokens computed at once: each step draws one between this
            and `chunk`, so that the weights do not depend on one size. None: always `chunk`.
        length: most tokens of a piece; None: 8,192, or the model's context if that is less.
        batch: pieces computed together.
        accumulate: batches whose gradients are summed for one step.
        full: whether all weights are trained; otherwise an adapter (LoRA) is.
        rank, alpha, dropout: LoRA's; None: 16, 32 and 0.
        targets: names of modules, comma-separated, or "all-linear"; None: the latter.
        lr: the learning rate of AdamW. It rises over the first `warmup` steps, then falls to 0.
            None: 2e-4, or 1e-5 with `full`.
        decay: how it falls, "linear" or "cosine".
        clip: greatest norm of a step's gradients, to which they are clipped; 0: no limit.
        steps, epochs: how long to train; None for both: one epoch.
        seed: determines initial weights, the order of the pieces, and dropout.
        eval_every, save_every: steps between evaluations and checkpoints; 0: at the end only.
        keep: how many of the newest checkpoints to keep.
        offload: whether weights, gradients and the optimizer's state are held in host memory.
        context_parallel: how many processes share each text.
        host_bytes, spill: see `kvkeep.files.offload.Offload`; `spill` is its directory.
    """

    task: str = "text"
    cache: str = "h2o:1024"
    chunk: int | None = None
    least_chunk: int | None = None
    length: int | None = None
    batch: int = 1
    accumulate: int = 1
    full: bool = False
    rank: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    targets: str | None = None
    lr: float | None = None
    warmup: int = 0
    decay: str = "linear"
    clip: float = 1.0
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    offload: bool = False
    context_parallel: int = 1
    host_bytes: int | None = None
    spill: str | None = None

    def checked(self) -> Options:
        """These options, validated, with their defaults and the cache's spec in full.

        Raises:
            OptionError: a value out of range, or two options that exclude each other.
            SpecError: the cache's spec does not exist.
        """
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise OptionError(f"{name} is {value}; give at least {low}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise OptionError(f"lr is {self.lr}; give a number above 0")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}; give at least 0 and less than 1")
        if self.task not in TASKS:
            raise OptionError(f"task is {self.task!r}; give {' or '.join(TASKS)}")
        if self.decay not in DECAYS:
            raise OptionError(f"decay is {self.decay!r}; give {' or '.join(DECAYS)}")
        given = [name for name in _LORA if getattr(self, name) is not None]
        if self.full and given:
            raise OptionError(
                f"{', '.join(given)} of LoRA, but all weights are trained; leave out the "
                f"{'option' if len(given) == 1 else 'options'}, or train an adapter"
            )
        lora = {} if self.full else {name: x for name, x in _LORA.items() if name not in given}
        if self.targets is not None and not self.named_targets:
            raise OptionError("no targets; give names of modules, or all-linear")
        if self.steps is not None and self.epochs is not None:
            raise OptionError(
                f"steps is {self.steps} and epochs is {self.epochs}; give one of them"
            )
        if self.offload and self.context_parallel > 1:
            raise OptionError(
                "processes that share a text hand over slots where the weights lie, but offloaded "
                "weights are not on the device; give either offload or context_parallel"
            )
        rate = _RATES[self.full] if self.lr is None else self.lr
        return replace(self, cache=str(parse_specs(self.cache)), lr=rate, **lora)

    def for_model(self, host: Host) -> Options:
        """These options, with chunk and length set.

        Raises:
            OptionError: pieces longer than the model's context, or a least chunk above `chunk`.
            ShapeError: a chunk above the cache's budget or step.
        """
        chunk = fitting(self.chunk, per_layer(self.cache, host.kinds))
        if self.least_chunk is not None and self.least_chunk > chunk:
            raise OptionError(
                f"chunks of at least {self.least_chunk} tokens, but of at most {chunk}; give the "
                "smaller number first, and at most the cache's budget"
            )
        most = host.context
        if self.length is not None and most is not None and self.length > most:
            raise OptionError(
                f"pieces of {self.length} tokens, but the model holds {most}; use a length of at "
                f"most {most}"
            )
        return replace(self, chunk=chunk, length=self.length or min(LENGTH, most or LENGTH))

    def for_processes(self, count: int) -> Options:
        """These options, for `count` processes with different texts.

        Raises:
            OptionError: some would never have a text.
        """
        if count > self.accumulate:
            raise OptionError(
                f"{count} processes with texts of their own, but a step has {self.accumulate} "
                f"batches; start at most {self.accumulate}, let several share a text "
                f"(--context-parallel), or use --accumulate {count}"
            )
        return self

    def for_data(self, count: int) -> Options:
        """These options, with the number of steps that `count` pieces take.

        Raises:
            OptionError: the warm-up takes all steps.
        """
        steps, epochs = self.steps, None
        if steps is None:
            epochs = self.epochs or 1
            steps = math.ceil(epochs * count / (self.batch * self.accumulate))
        if self.warmup >= steps:
            raise OptionError(
                f"{self.warmup} steps of warm-up, but there are {steps} in all; use a warm-up of "
                f"at most {steps - 1}"
            )
        return replace(self, steps=steps, epochs=epochs)

    def chunk_of(self, step: int) -> int:
        """Tokens computed at once in a step, counted from 0."""
        assert self.chunk is not None
        if self.least_chunk is None:
            return self.chunk
        return self.least_chunk + drawn(self.seed, step, "chunk") % (
            self.chunk - self.least_chunk + 1
        )

    @property
    def named_targets(self) -> str | list[str]:
        """`targets` in the form that PEFT takes."""
        assert self.targets is not None
        if self.targets == "all-linear":
            return self.targets
        return [name.strip() for name in self.targets.split(",") if name.strip()]

    def that_matter(self) -> dict[str, str | int | float | None]:
        """The options that the trained weights depend on."""
        return {name: value for name, value in asdict(self).items() if name not in _BESIDE}

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        assert self.steps is not None
        assert self.lr is not None
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / (self.steps - self.warmup)
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * left


def drawn(*what: int | str) -> int:
    """A whole number of 63 bits that looks random and depends on `what` alone."""
    found: int = xxhash.xxh3_64_intdigest(" ".join(map(str, what)).encode()) >> 1
    return found
