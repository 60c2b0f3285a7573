"""Fine-tuning by several processes; in a module that they can import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kvkeep.finetune.trainer
from kvkeep.errors import KVKeepError, LossError
from kvkeep.files import tensor_file
from kvkeep.finetune.options import Options
from kvkeep.finetune.run import finetune
from support import finetune_inputs
from support.process_group import join, start

OPTIONS = {
    "cache": "h2o:16",
    "chunk": 8,
    "length": 24,
    "batch": 2,
    "accumulate": 3,
    "lr": 1e-2,
    "warmup": 1,
    "clip": 0.5,
    "steps": 2,
    "eval_every": 1,
    "save_every": 1,
}


def tuned(data, out, resume=False, **options):
    """A run in double precision, in however many processes there are; its losses."""
    classify = options.get("task") == "classify"
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": bool(options.get("full"))}
    model = finetune_inputs.classifier() if classify else finetune_inputs.model(**sizes)
    model = model.double()
    given = Options(**OPTIONS | options, holdout=2)
    said = []
    found = finetune(
        model,
        finetune_inputs.tokenizer(),
        Path(data),
        Path(out),
        given,
        resume=resume,
        progress=lambda doing, share: said.append(doing),
    )
    losses = [one["loss"] for name in ("train_loss", "eval_loss") for one in found[name]]
    losses += [one["accuracy"] for one in found["eval_loss"] if classify]
    return [found["untuned_loss"], *losses], said


def no_loss(patch, rank):
    """The loss is not finite in the second process."""

    def failing(*args, **options):
        raise LossError("the loss is nan")

    if rank == 1:
        patch.setattr(kvkeep.finetune.trainer, "backward", failing)


def no_file(patch, rank):
    """The second process does not see the texts."""

    def failing(path):
        raise FileNotFoundError(2, "No such file")

    if rank == 1:
        patch.setattr(Path, "read_bytes", failing)


def no_room(patch, rank):
    """The disk is full while weights are written."""

    def full(path, tensors, metadata, *, sync, whole):
        whole(tensors[tensor_file.order(tensors)[0]])
        raise OSError(28, "No space left on device")

    patch.setattr(tensor_file, "write", full)


FAULTS = {"no loss": no_loss, "no file": no_file, "no room": no_room}


def work(rank: int, size: int, jobs: list[dict], path: str) -> None:
    join(rank, size, path)
    found = []
    for job in jobs:
        fault = job.pop("fault", None)
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                FAULTS[fault](patch, rank)
            try:
                found.append(tuned(**job))
            except KVKeepError as error:
                found.append(f"{type(error).__name__}: {error}")
    Path(path, f"found-{rank}").write_text(json.dumps(found))
    os._exit(0)  # see distributed_gradient.work


def run(size: int, jobs: list[dict], path: Path) -> list[list]:
    """What each process finds: for each job losses and what it said, or its error."""
    start(work, size, size, jobs, str(path))
    return [json.loads((path / f"found-{rank}").read_text()) for rank in range(size)]
