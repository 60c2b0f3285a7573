"""The predictions and answers of kvpress. `kvkeep_lab.evals.kvpress` runs this file by its path in
kvpress's own environment, which has no kvkeep.

    python kvpress_script.py REQUEST.json FOLDER

Each press compresses a context after one forward; the tokens after it are fed one by one, at their
true positions, and kept. FOLDER gets PRESS.safetensors with the logits and, last, answers.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

_PRESSES = {
    **{"snapkv": "SnapKVPress", "adakv": "AdaKVPress", "criticaladakv": "CriticalAdaKVPress"},
    **{"pyramid": "PyramidKVPress", "knorm": "KnormPress", "keydiff": "KeyDiffPress"},
    **{"streaming": "StreamingLLMPress", "tova": "TOVAPress", "kvzip": "KVzipPress"},
    "expected_attention": "ExpectedAttentionPress",
    "observed_attention": "ObservedAttentionPress",
}


def press_of(name: str, removed: float) -> Any:
    """A press that removes this share of the keys and values; None for `none`."""
    if name == "none":
        return None
    if name in ("adakv", "criticaladakv"):
        return getattr(kvpress, _PRESSES[name])(kvpress.SnapKVPress(removed))
    return getattr(kvpress, _PRESSES[name])(removed)


class Reader:
    """A model that reads contexts through a press."""

    def __init__(self, model: Any, press: Any) -> None:
        self.model, self.press = model, press

    def read(self, ids: Tensor) -> tuple[Any, Tensor]:
        """The compressed cache of ids (1, n), and the logits (1, V) after its last token."""
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache = DynamicCache()
        with nullcontext() if self.press is None else self.press(self.model):
            output = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        return cache, output.logits[:, -1]

    def step(self, cache: Any, token: Tensor, position: int) -> Tensor:
        """The logits (1, V) after a token (1, 1)."""
        where = torch.full((1, 1), position)
        output = self.model(input_ids=token, past_key_values=cache, position_ids=where)
        logits: Tensor = output.logits[:, -1]
        return logits

    def follow(self, ids: Tensor, context: int) -> tuple[Tensor, list[float], int, float]:
        """The logits (N, V) that predict the tokens after a context of ids (1, n), the seconds of
        each step, and the bytes and the share of keys and values held after the context."""
        cache, logits = self.read(ids[:, :context])
        held, kept = self._held(cache, context)
        found, seconds = [logits], []
        for position in range(context, ids.shape[1] - 1):
            start = time.perf_counter()
            found.append(self.step(cache, ids[:, position : position + 1], position))
            seconds.append(time.perf_counter() - start)
        return torch.cat(found), seconds, held, kept

    def answer(self, ids: Tensor, text: int, steps: int, end: int | None) -> list[int]:
        """The greedy answer to ids (1, n), of which the first `text` are compressed."""
        cache, logits = self.read(ids[:, :text])
        # Singly: otherwise kvpress masks layers of different lengths wrongly.
        for position in range(text, ids.shape[1]):
            logits = self.step(cache, ids[:, position : position + 1], position)
        found = list[int]()
        for position in range(ids.shape[1], ids.shape[1] + steps):
            token = logits.argmax(dim=-1, keepdim=True)
            found.append(int(token))
            if found[-1] == end or len(found) == steps:
                break
            logits = self.step(cache, token, position)
        return found

    def _held(self, cache: Any, context: int) -> tuple[int, float]:
        held = pairs = whole = 0
        for layer, module in zip(cache.layers, self.model.model.layers, strict=True):
            held += layer.keys.nbytes + layer.values.nbytes
            masked = module.self_attn.masked_key_indices
            pairs += layer.keys[..., 0].numel() - (0 if masked is None else masked[0].numel())
            whole += layer.keys.shape[1] * context
        return held, pairs / whole


@torch.inference_mode()
def main(request_file: str, folder: str) -> None:
    """Run all presses of a request."""
    request = json.loads(Path(request_file).read_text())
    torch.set_num_threads(request["threads"])
    dtype = getattr(torch, request["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval()
    if not isinstance(model, kvpress.SUPPORTED_MODELS):
        known = ", ".join(kind.__name__ for kind in kvpress.SUPPORTED_MODELS)
        sys.exit(f"kvpress does not support {type(model).__name__}; it supports {known}")
    rows = []
    for name in request["presses"]:
        sys.stdout.write(f"kvpress {name}\n")
        sys.stdout.flush()
        try:
            rows.append({"press": name, **_row(model, name, request, Path(folder))})
        except Exception as error:  # a press may fail in any way, and the other presses still run
            rows.append({"press": name, "failed": f"{type(error).__name__}: {error}"})
    versions = {package: version(package) for package in ("kvpress", "torch", "transformers")}
    (Path(folder) / "answers.json").write_text(json.dumps({"rows": rows, "versions": versions}))


def _row(model: Any, name: str, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Only this press needs the attention weights, and some refuse to run with them.
    model.set_attn_implementation("eager" if name == "observed_attention" else "sdpa")
    reader = Reader(model, press_of(name, 1 - request["kept"]))
    logits, seconds = list[Tensor](), list[float]()
    for ids in request["windows"]:
        found, times, held, kept = reader.follow(torch.tensor([ids]), request["context"])
        logits.append(found)
        seconds += times
    save_file({"logits": torch.stack(logits)}, folder / f"{name}.safetensors")
    answers = [
        reader.answer(torch.tensor([one["ids"]]), one["text"], one["steps"], request["end"])
        for one in request["prompts"]
    ]
    step = statistics.median(seconds) if seconds else None
    return {"bytes": held, "kept": kept, "step_s": step, "answers": answers}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
