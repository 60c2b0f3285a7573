"""The model whose compiled step of one row all tests use that need no step of their own: torch
takes ten seconds to compile one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from support.tiny_models import WINDOW, tiny

FAMILY = "qwen3"
"""Its norms of queries and keys have few weights, whose values torch's compiler would make
constants."""
WIDE = {"hidden_size": 192, "intermediate_size": 256, "vocab_size": 200}
"""Wide enough for kvkeep's own linear layers."""


def shared_model(**options: Any) -> PreTrainedModel:
    """A layer of full attention, and a sliding one."""
    sliding = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
    return tiny(FAMILY, **{**WIDE, **sliding, "head_dim": 8, **options})
