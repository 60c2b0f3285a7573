"""Fine-tuning on long texts through the cache that a model will be served with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    LongContext: Any
    """See `kvkeep.hf.trainer.LongContext`."""

__all__ = ["LongContext"]


def __getattr__(name: str) -> Any:
    if name != "LongContext":
        raise AttributeError(f"module 'kvkeep.finetune' has no attribute {name!r}")
    return import_module("kvkeep.hf.trainer").LongContext
