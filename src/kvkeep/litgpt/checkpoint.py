"""Load a LitGPT checkpoint directory: a model, its tokenizer, and perhaps an adapter."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from litgpt import Config
from litgpt.model import GPT
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host.registry import load_tokenizer
from kvkeep.litgpt.lora import CONFIG, with_adapter

WEIGHTS = "lit_model.pth"


def load(
    name: str | None,
    dtype: str = "auto",
    device: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    adapter: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[GPT, Any]:
    """Load the model in a checkpoint directory of LitGPT, and its tokenizer. Nothing is unpickled
    but tensors.

    Args:
        name: the directory, with `model_config.yaml`, `lit_model.pth` and a tokenizer's files.
        dtype: "auto" (that of the checkpoint) or the name of a torch dtype.
        device: a torch device; None: the accelerator if there is one, otherwise the CPU.
        adapter: the directory of an adapter that `kvkeep finetune` wrote.
        labels: must be None, since LitGPT has no models with a head for classes.

    Returns:
        The model, in evaluation, and transformers' tokenizer.

    Raises:
        UnsupportedError: a file is missing or damaged, the dtype does not exist, or there are
            labels.
    """
    if labels is not None:
        raise UnsupportedError(
            "LitGPT has no models with a head for classes; classify with --host transformers"
        )
    directory = Path(name or "")
    kind = None if dtype == "auto" else getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise UnsupportedError(f"no dtype {dtype!r}; use auto, float32 or bfloat16")
    missing = [file for file in (CONFIG, WEIGHTS) if not (directory / file).is_file()]
    if not name or missing:
        raise UnsupportedError(
            f"no LitGPT checkpoint in {name or 'no directory'}: there is no "
            f"{' and no '.join(missing or [CONFIG])}; give a directory that litgpt download or "
            "litgpt convert_to_litgpt made"
        )
    tokenizer = load_tokenizer(str(directory))
    progress(f"loading {name}")
    weights = _weights(directory / WEIGHTS)
    gpt = _built(directory, weights)
    place = device or (torch.accelerator.current_accelerator() or torch.device("cpu"))
    gpt.to(device=place, dtype=kind)
    gpt.cos, gpt.sin = gpt.rope_cache(device=gpt.lm_head.weight.device)  # in full precision
    gpt.checkpoint_dir = directory
    gpt.eval()
    return (gpt if adapter is None else with_adapter(gpt, Path(adapter))), tokenizer


def _weights(path: Path) -> Mapping[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UnsupportedError(
            f"cannot read {path}: {' '.join(str(error).split())[:200]}; convert the checkpoint "
            "again"
        ) from error
    found = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise UnsupportedError(f"{path} is no state dict of tensors; convert the checkpoint again")
    return found


def _built(directory: Path, weights: Mapping[str, Tensor]) -> GPT:
    try:
        config = Config.from_file(directory / CONFIG)
        layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
        if config.n_layer != len(layers):  # so that no file decides how many are built
            raise ValueError(f"n_layer is {config.n_layer}, but there are {len(layers)} layers")
        with torch.device("meta"):
            gpt = GPT(config)
        gpt.load_state_dict(dict(weights), assign=True)
        gpt.cos, gpt.sin = gpt.rope_cache(device=torch.device("cpu"))
    except Exception as error:  # a config may have any fields
        raise UnsupportedError(
            f"{directory / CONFIG} does not describe {WEIGHTS}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    return gpt
