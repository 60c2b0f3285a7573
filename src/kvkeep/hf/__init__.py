"""kvkeep for Hugging Face transformers: the only package that imports it."""

from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache

__all__ = ["Attachment", "Cache", "attach", "detach"]
