"""Fine-tuning on long texts through the cache that will serve the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.finetune.rollouts import Rollouts as Rollouts

    LongContext: Any
    """See `kvkeep.finetune.long_context.LongContext`."""

__all__ = ["LongContext", "Rollouts"]

_FROM = {"LongContext": "kvkeep.finetune.long_context", "Rollouts": "kvkeep.finetune.rollouts"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'kvkeep.finetune' has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
