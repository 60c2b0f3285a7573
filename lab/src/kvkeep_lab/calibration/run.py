"""`calibrate`: train a scorer for the policy `kvzap`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.files import tensor_file
from kvkeep.host import Host, host_of
from kvkeep.host.fingerprint import sampled
from kvkeep.host.progress import Progress, silent
from kvkeep.policy.scorer import LayerScorer, Scorer
from kvkeep_lab.calibration.options import CalibrationError, CalibrationOptions
from kvkeep_lab.calibration.samples import Samples, sampled_text
from kvkeep_lab.calibration.texts import texts
from kvkeep_lab.calibration.training import divided, trained

_TRAINED = ("features", "targets")
_TRAINING = 0.25  # the share of the time that training takes, about


def calibrate(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    progress: Progress = silent,
    **options: Any,
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
        progress: see `Progress`.
        options: see `kvkeep_lab.calibration.options.CalibrationOptions`.

    Returns:
        `file`, `bytes`, `tokens` read, `seconds`, and `layers`: for each with a scorer its `layer`,
        `r2` (the variance of held-out scores that it predicts, the mean over heads) and `share`
        (its share of slots where a quarter is kept).

    Raises:
        CalibrationError: an option is out of range, or the file cannot be written.
        ShapeError: the text is too short.
        SpecError, UnsupportedError: the model cannot be compressed; see `kvkeep.Cache.compress`.
    """
    began, out, asked = time.monotonic(), Path(out), CalibrationOptions(**options)
    host, length = host_of(model), asked.length
    if host.context is not None:
        length = min(length, host.context // 2)
    rows = texts(tokenizer, asked.count, length, asked.text_file)
    held = out.with_name(out.name + ".samples")
    try:
        held.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(f"cannot write {held}: {error}") from error
    identity = sampled(model)
    with host.attach("keep_all", linears=False):
        gathered = []
        for index, row in enumerate(rows):
            progress(f"text {index + 1} of {len(rows)}", (1 - _TRAINING) * index / len(rows))
            gathered.append(sampled_text(host, row, held / f"{index}.safetensors", identity))
    scorer, found = _scorer(host, gathered, identity, asked, progress)
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
    host: Host,
    gathered: list[Samples],
    identity: str,
    asked: CalibrationOptions,
    progress: Progress,
) -> tuple[Scorer, list[dict[str, Any]]]:
    """Train the scorers of all layers, and tell how well each predicts."""
    held_out = max(1, len(gathered) // 8)
    shares = divided({i: [one.scores[i] for one in gathered] for i in gathered[0].scores})
    layers, found = {}, []
    for done, index in enumerate(gathered[0].scores):
        progress(f"layer {index}", 1 - _TRAINING * (1 - done / len(shares)))
        data = _joined(gathered[:-held_out], index)
        networks = trained(*data, asked.hidden, asked.steps, host.device)
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
