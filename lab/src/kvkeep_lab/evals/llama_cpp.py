"""llama.cpp's predictions on the same text, with its keys and values in its own types."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.host.progress import Progress, silent
from kvkeep_lab.bench import llama_cpp
from kvkeep_lab.evals.figures import Measured

_TYPES = {"q8_0": (8, 34), "q5_1": (7, 24), "q4_0": (2, 18)}
"""The number of each type of llama.cpp's caches, and the bytes of 32 elements."""


class LlamaCpp:
    """llama.cpp with the weights of a Llama and its cache in the model's dtype, then in each type
    of `_TYPES`. It answers no tasks."""

    late: ClassVar[bool] = False
    require = staticmethod(llama_cpp.require)

    def rows(self, asked: Measured, progress: Progress = silent) -> list[dict[str, Any]]:
        """A row for each type, of the figures that `kvkeep_lab.evals.run.evaluate` has for a
        spec."""
        model, context, config = asked.model, asked.context, asked.model.config
        own = str(model.dtype).removeprefix("torch.")
        types = {own: (int(llama_cpp.TYPES[model.dtype]), 32 * model.dtype.itemsize), **_TYPES}
        elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        versions = {"llama-cpp-python": llama_cpp.library().__version__}
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for name, (kind, size) in types.items():
                progress(f"llama.cpp {name}, {context} tokens", None)
                llama = llama_cpp.opened(model, Path(folder), asked.text.shape[1], kind)
                logits, seconds = _predicted(llama, asked.text, context)
                held = {"bytes": context * elements * size // 32, "tokens_per_s": 1 / seconds}
                row = asked.row(f"llama.cpp {name}", logits, {}, **held, versions=versions)
                found.append(row)
        return found


def _predicted(llama: Any, text: Tensor, context: int) -> tuple[list[Tensor], float]:
    """The N predictions (windows, V) of the tokens after the context, fed one at a time, and the
    median time of a step in seconds."""
    found, times = list[Tensor](), list[float]()
    for window in text.tolist():
        llama.reset()
        mine = [llama_cpp.fed(llama, window[:context])]
        for token in window[context:-1]:
            start = time.perf_counter()
            mine.append(llama_cpp.fed(llama, [token]))
            times.append(time.perf_counter() - start)
        found.append(torch.stack(mine))
    llama.close()
    median = statistics.median_high(times) if times else float("nan")
    return list(torch.stack(found, dim=1)), median
