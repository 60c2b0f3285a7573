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
"""Tokens after which a compiled step has saved the time that it took to compile. A layer's part
takes 1.5 s and saves 0.4 ms of each token, on two cores of a Zen 4."""


def pays(model: Any, tokens: int, sequences: int = 1) -> bool:
    """Whether to compile the steps of a model that is not attached: with the tokens of this call it
    has generated enough, and some are not compiled.

    Args:
        model: the model.
        tokens: the most that this call generates.
        sequences: how many sequences it generates at once.
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
    """Count what a model has generated, for later calls of `pays`; -1: never compile it."""
    key = _key(model) if tokens else None
    if key is not None:
        saved_steps.note_use(key, tokens)


def _key(model: Any) -> str | None:
    """The key of a model whose steps can be compiled and kept."""
    return None if saved_steps.directory() is None else key_of(unwrapped(model))


@torch.inference_mode()
def compile_steps(model: Any, sequences: int = 1, progress: Progress = silent) -> list[Path]:
    """Compile the steps of a model that is not attached, unless that was done before.

    Args:
        model: the model, on the CPU.
        sequences: also compile packed steps of up to this many sequences.
        progress: told how much of that is done.

    Returns:
        The files of its programs, which later processes use.

    Raises:
        UnsupportedError: there is nowhere to keep programs, or the model cannot be one.
    """
    if saved_steps.directory() is None:
        raise UnsupportedError(
            "compiled steps cannot be kept; let KVKEEP_STEPS name a directory that only you can "
            "write to"
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
            f"the steps of {type(model).__name__} are compiled in each process anew: they depend "
            "on data, or the model has hooks, or is on another device than the CPU; attach it with "
            "compile=True, which compiles them at the first step"
        )
    return files
