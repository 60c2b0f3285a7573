"""llama.cpp's predictions on the same text, with its keys and values in its own types."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.host.progress import Progress, silent
from kvkeep_lab.evals.figures import Measured, in_figures
from kvkeep_lab.evals.quality import compare
from kvkeep_lab.extras import needed_by

_TYPES = {"q8_0": (8, 34), "q5_1": (7, 24), "q4_0": (2, 18)}
"""The number of each type of llama.cpp's caches, and the bytes of 32 elements."""


class LlamaCpp:
    """llama.cpp with the weights of a Llama and its cache in the model's dtype, then in each type
    of `_TYPES`. It answers no tasks."""

    late: ClassVar[bool] = False

    def require(self, model: Any) -> None:
        """Check that llama.cpp can run the model.

        Raises:
            MissingPackageError: llama-cpp-python is not installed.
            UnsupportedError: the model is no Llama.
        """
        from kvkeep_lab.bench.llama_cpp import require

        require(model)

    def rows(self, asked: Measured, progress: Progress = silent) -> list[dict[str, Any]]:
        """A row for each type, of the figures that `kvkeep_lab.evals.run.evaluate` has for a
        spec."""
        from kvkeep_lab.bench.llama_cpp import TYPES, write_gguf

        model, text, context, full = asked.model, asked.text, asked.context, asked.full
        own = str(model.dtype).removeprefix("torch.")
        types = {own: (int(TYPES[model.dtype]), 32 * model.dtype.itemsize), **_TYPES}
        config, ids = model.config, text[:, context:]
        elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        same = compare(full, full, ids).perplexity
        found = []
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "model.gguf")
            write_gguf(model, path)
            for name, (kind, size) in types.items():
                progress(f"llama.cpp {name}, {context} tokens", None)
                logits, seconds, version = _predicted(path, kind, text, context)
                mine = compare(logits.unbind(1), full, ids)
                held = context * elements * size // 32
                found.append(
                    {
                        "spec": f"llama.cpp {name}",
                        "context": context,
                        **vars(mine),
                        "perplexity_ratio": mine.perplexity / same,
                        "bytes": held,
                        "tokens_per_s": 1 / seconds,
                        "versions": {"llama-cpp-python": version},
                        **in_figures({}, {}),
                    }
                )
        return found


def _predicted(path: Path, kind: int, text: Tensor, context: int) -> tuple[Tensor, float, str]:
    """The predictions (windows, N, V) of the tokens after the context, fed one at a time; the
    median time of a step in seconds; and the version of llama-cpp-python."""
    with needed_by("Measuring llama.cpp", "llama-cpp"):
        import llama_cpp
        import numpy as np

    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=text.shape[1],
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,  # without it, values have no types of fewer bits
        type_k=kind,
        type_v=kind,
        verbose=False,
    )

    def fed(tokens: list[int]) -> Tensor:
        llama.eval(tokens)
        last = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(last, shape=(llama.n_vocab(),)).copy())

    found, times = [], []
    for window in text.tolist():
        llama.reset()
        found.append([fed(window[:context])])
        for token in window[context:-1]:
            start = time.perf_counter()
            found[-1].append(fed([token]))
            times.append(time.perf_counter() - start)
    llama.close()
    logits = torch.stack([torch.stack(one) for one in found])
    median = sorted(times)[len(times) // 2] if times else float("nan")
    return logits, median, llama_cpp.__version__
