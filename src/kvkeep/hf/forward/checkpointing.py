"""Gradient checkpointing in forwards through a cache. In training mode, transformers' checkpointing
removes the cache from the arguments of a model's layers. Without gradients checkpointing has no
use, so it is paused for the forward."""

from __future__ import annotations

import torch
from torch import nn

from kvkeep.errors import UnsupportedError

_PAUSED = "kvkeep_paused"


def pause(decoder: nn.Module) -> None:
    """Turn off a decoder's gradient checkpointing until `resume`, so that its layers use the cache.

    Raises:
        UnsupportedError: gradients are enabled, so checkpointing is needed.
    """
    if not decoder.training:
        return
    parts = [x for x in decoder.modules() if getattr(x, "gradient_checkpointing", False)]
    if not parts:
        return
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"gradient checkpointing of {type(decoder).__name__} in training removes the cache "
            "from its layers' arguments, because the backward recomputes layers without it; call "
            "model.gradient_checkpointing_disable() or model.eval(), use torch.no_grad(), or give "
            "no cache"
        )
    for part in parts:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    decoder.__dict__[_PAUSED] = parts


def resume(decoder: nn.Module) -> None:
    """Undo `pause`: after the forward, or, if it was interrupted, before the next forward."""
    for part in decoder.__dict__.pop(_PAUSED, ()):
        part.gradient_checkpointing = True
