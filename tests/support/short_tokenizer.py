"""SmolLM2's tokenizer with the first tokens of its vocabulary: it is loaded and hashed faster."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from kvkeep.hf.models import resolve

SIZE = 4096


@cache
def short_tokenizer() -> Any:
    """The tokenizer; it is shared, so tests that change one load their own from a directory."""
    with TemporaryDirectory() as place:
        AutoTokenizer.from_pretrained(resolve("smollm2-135m")).save_pretrained(place)
        file = Path(place, "tokenizer.json")
        content = json.loads(file.read_text())
        model = content["model"]
        kept = {text: token for text, token in model["vocab"].items() if token < SIZE}
        merges = [
            pair for pair in model["merges"] if "".join(pair) in kept and kept.keys() >= {*pair}
        ]
        content["model"] = model | {"vocab": kept, "merges": merges}
        file.write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(place)
