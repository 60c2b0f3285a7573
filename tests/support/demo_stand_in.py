"""A tiny random model under the demo model's name, for tests of what is done around a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvkeep.named_models import installed
from support.short_tokenizer import SIZE, short_tokenizer
from support.tiny_models import tiny

NAME = "smollm2-135m"
LAYERS = 2
"""Of the model that `stand_in_home` has."""


def stand_in(folder: Path, **overrides: Any) -> dict[str, str]:
    """Write one, with a part of the real tokenizer; the environment in which it has the name."""
    assert NAME in installed()
    place = folder / "models" / NAME
    sizes = {"vocab_size": SIZE, "max_position_embeddings": 8192} | overrides
    tiny("llama", **sizes).save_pretrained(place)
    short_tokenizer().save_pretrained(place)
    return {**os.environ, "KVKEEP_HOME": str(folder)}
