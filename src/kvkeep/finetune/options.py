"""The options of a fine-tuning run, and checks that they fit each other, the model and the data.

`kvkeep finetune` derives its own options from them, so this module does not import torch before a
check.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvkeep.errors import KVKeepError
from kvkeep.options import option, require_allowed

if TYPE_CHECKING:
    from kvkeep.host import Host

LENGTH = 8192

_LORA: dict[str, Any] = {"rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}
_RATES = {False: 2e-4, True: 1e-5}
"""The default learning rates for an adapter, and for all weights."""


class OptionError(KVKeepError, ValueError):
    """Options do not fit each other, the data or the model."""


_aside = partial(option, unrelated=True)
"""An option that does not affect the trained weights."""


@dataclass(frozen=True)
class Options:
    """The options of fine-tuning.

    Attributes:
        task: "text" (predict the next token) or "classify".
        cache: the cache's spec in training; use the spec that will serve the model.
        chunk: tokens computed at once; None: 1,024, or the cache's budget or step if that is less.
        least_chunk: the least number of tokens computed at once: each step draws a number between
            this and `chunk`, so that the weights do not depend on one size. None: always `chunk`.
        length: most tokens of a piece; None: 8,192, or the model's context if that is less.
        batch: pieces computed together.
        accumulate: batches whose gradients are summed for one step.
        full: train all weights; otherwise an adapter (LoRA).
        rank, alpha, dropout: LoRA's rank, alpha and dropout; None: 16, 32 and 0.
        targets: names of modules, comma-separated, or "all-linear" (the default, None).
        lr: the learning rate of AdamW. It rises over the first `warmup` steps, then falls to 0.
            None: 2e-4, or 1e-5 with `full`.
        decay: how the learning rate falls, "linear" or "cosine".
        clip: greatest norm of a step's gradients, to which they are clipped; 0: no limit.
        steps, epochs: length of the training; None for both: one epoch.
        seed: determines initial weights, the order of the pieces, and dropout.
        evaluation: a file like the training data, to evaluate on.
        holdout: without `evaluation`, the number of last documents of the data that are used for
            evaluation instead of training; None: one if there are several. 0: no evaluation.
        eval_every, save_every: steps between evaluations and checkpoints; 0: at the end only.
        keep: number of newest checkpoints to keep.
        offload: keep weights, gradients and optimizer state in host memory.
        context_parallel: number of processes that share each text.
        host_bytes, spill: see `kvkeep.files.offload.Offload`; `spill` is its directory.
        report_to: receivers of each step's metrics, comma-separated: integrations of transformers'
            Trainer, such as "tensorboard" or "wandb".
    """

    task: str = option("text", "Task to learn: text, or classify.", values=("text", "classify"))
    cache: str = option("h2o:1024", "Cache spec that will serve the result.", complete="specs")
    chunk: int | None = option(None, min=1)
    least_chunk: int | None = option(None, min=1)
    length: int | None = option(
        None, "Most tokens of a piece of text; default: 8192, at most the context.", min=2
    )
    steps: int | None = option(None, "Training steps.", min=1)
    epochs: int | None = option(None, "Passes over the data.", min=1)
    batch: int = option(1, "Pieces of text in a batch.", min=1)
    accumulate: int = option(1, "Batches in a step.", min=1)
    full: bool = option(False, "Train all weights, not an adapter.", flag=True)
    rank: int | None = option(None, "Rank of LoRA; default: 16.", min=1)
    alpha: int | None = option(None, "LoRA's scale is alpha / rank; default: 32.", min=1)
    dropout: float | None = option(None, "Dropout of LoRA; default: 0.", min=0)
    targets: str | None = option(None, "Modules to adapt, comma-separated; default: all linear.")
    lr: float | None = option(None, "AdamW's learning rate; default: 2e-4, or 1e-5 with --full.")
    warmup: int = option(0, "Warm-up steps of the learning rate.", min=0)
    decay: str = option(
        "linear", "Decay of the learning rate: linear or cosine.", values=("linear", "cosine")
    )
    clip: float = option(1.0, "Norm to which gradients are clipped; 0: no limit.", min=0)
    seed: int = option(0, "Seed for weights, order and dropout.")
    evaluation: Path | None = option(
        None, "Evaluate on this file.", unrelated=True, name="--eval", exists=True, dir_okay=False
    )
    holdout: int | None = _aside(
        None, "Evaluate on this many last documents instead of training on them.", min=0
    )
    eval_every: int = _aside(0, "Steps between evaluations; 0: at the end only.", min=0)
    save_every: int = _aside(0, "Steps between checkpoints; 0: at the end only.", min=0)
    keep: int = _aside(2, "Number of newest checkpoints to keep.", min=1)
    offload: bool = _aside(
        False, "Keep weights, gradients and optimizer in host memory (FSDP2).", flag=True
    )
    context_parallel: int = _aside(1, "Processes that share each text, under torchrun.", min=1)
    host_bytes: int | None = _aside(
        None,
        "Most host memory for the layers' stored inputs, e.g. 8GB.",
        name="--host-memory",
        size="",
    )
    spill: Path | None = option(
        None,
        "Directory for the inputs that exceed --host-memory.",
        unrelated=True,
        exists=True,
        file_okay=False,
    )
    report_to: str | None = _aside(None, "Report metrics to, e.g., tensorboard,wandb.")

    def checked(self) -> Options:
        """Validate the options; return them with their defaults and the cache's spec in full.

        Raises:
            OptionError: a value is out of range, or two options exclude each other.
            SpecError: the cache's spec does not exist.
        """
        from kvkeep.spec import parse_specs

        require_allowed(self, OptionError)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise OptionError(f"lr is {self.lr}; give a number above 0")
        if self.dropout is not None and not self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}; give at least 0 and less than 1")
        given = [name for name in _LORA if getattr(self, name) is not None]
        if self.full and given:
            what = f"{', '.join(given)} of LoRA, but all weights are trained"
            raise OptionError(f"{what}; leave LoRA's options out, or train an adapter")
        lora = {} if self.full else {name: x for name, x in _LORA.items() if name not in given}
        if self.targets is not None and not self.named_targets:
            raise OptionError("no targets; give names of modules, or all-linear")
        if self.evaluation is not None and self.holdout is not None:
            raise OptionError("an evaluation file and a holdout are both given; give one of them")
        if self.steps is not None and self.epochs is not None:
            what = f"steps is {self.steps} and epochs is {self.epochs}"
            raise OptionError(f"{what}; give one of them")
        if self.offload and self.context_parallel > 1:
            what = "processes that share a text need their weights on the device"
            raise OptionError(f"{what}; give either offload or context_parallel")
        rate = _RATES[self.full] if self.lr is None else self.lr
        return replace(self, cache=str(parse_specs(self.cache)), lr=rate, **lora)

    def for_model(self, host: Host) -> Options:
        """These options, with chunk and length set.

        Raises:
            OptionError: pieces are longer than the model's context, or the least chunk exceeds
                `chunk`.
            ShapeError: a chunk exceeds the cache's budget or step.
        """
        from kvkeep.host import per_layer
        from kvkeep.train.walk import fitting

        chunk = fitting(self.chunk, per_layer(self.cache, host.kinds))
        if self.least_chunk is not None and self.least_chunk > chunk:
            what = f"least_chunk is {self.least_chunk}, but chunks have at most {chunk} tokens"
            raise OptionError(f"{what}; give a smaller one")
        most = host.context
        if self.length is not None and most is not None and self.length > most:
            what = f"pieces of {self.length} tokens, but the model holds {most}"
            raise OptionError(f"{what}; use a length of at most {most}")
        return replace(self, chunk=chunk, length=self.length or min(LENGTH, most or LENGTH))

    def for_data(self, count: int) -> Options:
        """These options, with the number of steps for `count` pieces.

        Raises:
            OptionError: the warm-up takes all steps.
        """
        steps, epochs = self.steps, None
        if steps is None:
            epochs = self.epochs or 1
            steps = math.ceil(epochs * count / (self.batch * self.accumulate))
        if self.warmup >= steps:
            what = f"{self.warmup} steps of warm-up, but there are {steps} in all"
            raise OptionError(f"{what}; use a warm-up of at most {steps - 1}")
        return replace(self, steps=steps, epochs=epochs)

    def chunk_of(self, step: int) -> int:
        """Tokens computed at once in a step, counted from 0."""
        assert self.chunk is not None
        if self.least_chunk is None:
            return self.chunk
        sizes = self.chunk - self.least_chunk + 1
        return self.least_chunk + seed_of(self.seed, step, "chunk") % sizes

    @property
    def named_targets(self) -> str | list[str]:
        """`targets` in PEFT's form."""
        assert self.targets is not None
        if self.targets == "all-linear":
            return self.targets
        return [name.strip() for name in self.targets.split(",") if name.strip()]

    def that_matter(self) -> dict[str, str | int | float | None]:
        """The options that affect the trained weights."""
        matter = [one.name for one in fields(self) if not one.metadata.get("unrelated")]
        return {name: value for name, value in asdict(self).items() if name in matter}

    def arguments(self) -> dict[str, Any]:
        """These options by the names of transformers' `TrainingArguments`."""
        return {
            "max_steps": self.steps,
            "learning_rate": self.lr,
            "warmup_steps": self.warmup + 1,  # see FineTuner.create_scheduler
            "lr_scheduler_type": self.decay,
            "max_grad_norm": self.clip,
            "eval_steps": self.eval_every or self.steps,
            "save_steps": self.save_every or self.steps,
            "report_to": (self.report_to or "none").split(","),
        }


def seed_of(*what: int | str) -> int:
    """A pseudo-random 63-bit number that depends only on `what`."""
    found: int = xxhash.xxh3_64_intdigest(" ".join(map(str, what)).encode()) >> 1
    return found
