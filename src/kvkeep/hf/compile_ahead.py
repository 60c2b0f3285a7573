"""Compile a model's decode steps before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import UnsupportedError
from kvkeep.hf import saved_steps
from kvkeep.hf.attach import attach, unwrapped
from kvkeep.hf.compiled import programs_of
from kvkeep.hf.host import TransformersHost
from kvkeep.host.progress import Progress, silent


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
        cache = host.new_cache()
        for count in (2, 1):
            host.forward(torch.zeros(1, count, dtype=torch.int64), cache)
        if sequences > 1:
            host.warm("keep_all", sequences, progress)
        files = programs_of(model)
    if not files:
        raise UnsupportedError(
            f"the steps of {type(model).__name__} are compiled in each process anew: they depend "
            "on data, or the model has hooks, or is on another device than the CPU"
        )
    return files
