"""Gradient checkpointing in forwards through a cache: it takes the cache from a model's layers, in
training mode. Without gradients it saves nothing, so it is paused for the forward."""

from __future__ import annotations

import torch
from torch import nn

from kvkeep.errors import UnsupportedError

_PAUSED = "kvkeep_paused"


def pause(decoder: nn.Module) -> None:
    """Let a decoder's layers use the cache that they are given, until `resume`.

    Raises:
        UnsupportedError: gradients are enabled, and their backward needs the checkpointing.
    """
    if not decoder.training:
        return
    parts = [x for x in decoder.modules() if getattr(x, "gradient_checkpointing", False)]
    if not parts:
        return
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"gradient checkpointing of {type(decoder).__name__} in training takes the cache from "
            "its layers, which are computed again without it; call "
            "model.gradient_checkpointing_disable() or model.eval(), use torch.no_grad(), or give "
            "no cache"
        )
    for part in parts:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    decoder.__dict__[_PAUSED] = parts


def resume(decoder: nn.Module) -> None:
    """Undo `pause`; after a forward that was interrupted, before the next one."""
    for part in decoder.__dict__.pop(_PAUSED, ()):
        part.gradient_checkpointing = True
