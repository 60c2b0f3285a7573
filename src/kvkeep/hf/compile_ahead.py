"""Compile a model's decode steps before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import UnsupportedError
from kvkeep.hf.attach import attach, unwrapped
from kvkeep.hf.forward.packed import numbers_up_to
from kvkeep.hf.host import TransformersHost
from kvkeep.hf.steps import saved_steps
from kvkeep.hf.steps.step import key_of, programs_of
from kvkeep.host.progress import Progress, silent

PAYS_AFTER = 4000
"""Tokens after which a compiled step has saved the time of its compilation: for each layer,
compiling takes 1.5 s and saves 0.4 ms a token, on two cores of a Zen 4."""


def pays(model: Any, tokens: int, sequences: int = 1) -> bool:
    """Whether to compile the steps of a model that is not attached: some needed steps are not
    compiled, and with this call the model has generated enough tokens.

    Args:
        model: the model.
        tokens: the most tokens that this call generates.
        sequences: number of sequences that it generates at once.
    """
    key = _key(model)
    used = -1 if key is None else saved_steps.used(key)
    if key is None or used < 0:
        return False
    rows = numbers_up_to(sequences) if sequences > 1 else []
    needed = {"input_ids-1", *[f"input_ids-position_ids-{number}" for number in rows]}
    found = {file.stem.partition("-")[2] for file in saved_steps.files_of(key)}
    return bool(needed - found) and used + tokens >= PAYS_AFTER * len(needed - found)


def note_tokens(model: Any, tokens: int) -> None:
    """Count tokens that a model has generated, for later calls of `pays`; -1: never compile it."""
    key = _key(model) if tokens else None
    if key is not None:
        saved_steps.note_use(key, tokens)


def _key(model: Any) -> str | None:
    """The key of a model's compiled steps; None: they cannot be compiled or kept."""
    return None if saved_steps.directory() is None else key_of(unwrapped(model))


@torch.inference_mode()
def compile_steps(model: Any, sequences: int = 1, progress: Progress = silent) -> list[Path]:
    """Compile the steps of a model that is not attached, unless they are compiled already.

    Args:
        model: the model, on the CPU.
        sequences: also compile packed steps of up to this many sequences.
        progress: called with the share that is done.

    Returns:
        The files of the model's programs, which later processes use.

    Raises:
        UnsupportedError: there is no directory for programs, or the model's steps cannot be kept.
    """
    if saved_steps.directory() is None:
        raise UnsupportedError(
            "compiled steps cannot be kept; set KVKEEP_STEPS to a directory to which only you can "
            "write"
        )
    model = unwrapped(model)
    progress("compiling steps", 0.0)
    with attach(model, compile=True):
        host = TransformersHost(model)
        host.warm("keep_all", 1)
        if sequences > 1:
            host.warm("keep_all", sequences, progress)
        files = programs_of(model)
    if not files:
        raise UnsupportedError(
            f"compiled steps of {type(model).__name__} cannot be kept for other processes: they "
            "depend on data, or the model has hooks, or is not on the CPU; attach it with "
            "compile=True, which compiles them at the first step of each process"
        )
    return files
