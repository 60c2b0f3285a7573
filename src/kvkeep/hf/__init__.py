"""kvkeep for Hugging Face transformers."""

from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache

__all__ = ["Attachment", "Cache", "attach", "detach"]
