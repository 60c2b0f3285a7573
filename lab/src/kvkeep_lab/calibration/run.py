"""`calibrate`: train a scorer for the policy `kvzap`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.files import tensor_file
from kvkeep.host import Host, host_of
from kvkeep.host.fingerprint import sampled
from kvkeep.host.progress import Progress, silent
from kvkeep.policy.scorer import LayerScorer, Scorer
from kvkeep_lab.calibration.samples import Samples, sampled_text
from kvkeep_lab.calibration.texts import texts
from kvkeep_lab.calibration.training import divided, trained

_TRAINED = ("features", "targets")
_TRAINING = 0.25  # the share of the time that training takes, about


class CalibrationError(KVKeepError):
    """Options of a calibration are out of range, or its files cannot be written."""


def calibrate(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    text_file: Path | None = None,
    count: int = 24,
    length: int = 4096,
    hidden: int = 32,
    steps: int = 600,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a scorer for a model, and write its file, for specs such as `kvzap:25%,scorer=out`.

    The model reads each text twice, as the policy `kvzip` does, which gives every token a score in
    every layer and head. A small network for each head learns to predict the scores' logarithms
    from the token's own key and value. One text of eight is held out.

    The training data from each text is kept in the directory `out`.samples until the scorer is
    written, so a run that was interrupted continues there.

    Args:
        model: not attached.
        out: the scorer's file, in safetensors format.
        text_file: UTF-8 text to read; None: sources and docstrings of Python's standard library.
        count: texts, at least 2.
        length: tokens of each text; at most half of the model's context.
        hidden: units of each network.
        steps: of training, for each layer.
        progress: see `Progress`.

    Returns:
        `file`, `bytes`, `tokens` read, `seconds`, and `layers`: for each with a scorer its `layer`,
        `r2` (the variance of held-out scores that it predicts, the mean over heads) and `share`
        (its share of slots where a quarter is kept).

    Raises:
        CalibrationError: an option is out of range, or the file cannot be written.
        ShapeError: the text is too short.
        SpecError, UnsupportedError: the model cannot be compressed; see `kvkeep.Cache.compress`.
    """
    began, out = time.monotonic(), Path(out)
    if count < 2 or hidden < 1 or steps < 1 or length < 64:
        raise CalibrationError(
            f"{count} texts of {length} tokens, {hidden} units, {steps} steps: at least 2 texts, "
            "64 tokens, one unit and one step are needed"
        )
    host = host_of(model)
    if host.context is not None and 2 * length > host.context:
        length = host.context // 2
    rows = texts(tokenizer, count, length, text_file)
    held = out.with_name(out.name + ".samples")
    try:
        held.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(f"cannot write {held}: {error}") from error
    identity = sampled(model)
    with host.attach("keep_all", linears=False):
        gathered = []
        for index, row in enumerate(rows):
            progress(f"text {index + 1} of {count}", (1 - _TRAINING) * index / count)
            gathered.append(sampled_text(host, row, held / f"{index}.safetensors", identity))
    scorer, found = _scorer(host, gathered, identity, hidden, steps, progress)
    tensors, metadata = scorer.content()
    try:
        tensor_file.write(out, tensors, metadata, sync=True)
    except OSError as error:
        raise CalibrationError(f"cannot write {out}: {error}") from error
    shutil.rmtree(held, ignore_errors=True)
    return {
        "file": str(out),
        "bytes": tensor_file.size(tensors, metadata),
        "tokens": rows.numel(),
        "seconds": time.monotonic() - began,
        "layers": found,
    }


def _scorer(
    host: Host, gathered: list[Samples], identity: str, hidden: int, steps: int, progress: Progress
) -> tuple[Scorer, list[dict[str, Any]]]:
    """Train the scorers of all layers, and tell how well each predicts."""
    held_out = max(1, len(gathered) // 8)
    shares = divided({i: [one.scores[i] for one in gathered] for i in gathered[0].scores})
    layers, found = {}, []
    for done, index in enumerate(gathered[0].scores):
        progress(f"layer {index}", 1 - _TRAINING * (1 - done / len(shares)))
        networks = trained(*_joined(gathered[:-held_out], index), hidden, steps, host.device)
        features, true = _joined(gathered[-held_out:], index)
        r2 = _explained(networks(features.float()), true)
        layers[index] = LayerScorer(networks, tuple(shares[index]), str(index))
        share = layers[index].share_at(0.25)
        found.append({"layer": index, "r2": round(r2, 4), "share": round(share, 4)})
    return Scorer(layers, identity, len(host.kinds)), found


def _joined(gathered: list[Samples], index: int) -> tuple[Tensor, Tensor]:
    """The features and targets of a layer in several texts."""
    features, targets = ([getattr(x, name)[index] for x in gathered] for name in _TRAINED)
    return torch.cat(features, dim=1), torch.cat(targets, dim=1)


def _explained(predicted: Tensor, true: Tensor) -> float:
    """The share of the variance of true (H, n) that is predicted, on average over heads."""
    left = (predicted - true).square().mean(dim=1)
    return float((1 - left / true.var(dim=1).clamp(min=1e-12)).mean())
