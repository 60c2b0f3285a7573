"""Fine-tuning on long texts through the cache that will serve the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.registry import exports

if TYPE_CHECKING:
    from kvkeep.finetune.rollouts import Rollouts as Rollouts

    LongContext: Any
    """See `kvkeep.finetune.long_context.LongContext`."""

_HOMES = {"long_context": ["LongContext"], "rollouts": ["Rollouts"]}

__getattr__, __all__ = exports(globals(), "", {}, _HOMES)
