"""Fine-tuning on long texts through the cache that a model will be served with."""

from kvkeep.finetune.trainer import LongContext

__all__ = ["LongContext"]
