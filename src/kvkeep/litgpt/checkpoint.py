"""Load a LitGPT checkpoint directory: a model, its tokenizer, and optionally an adapter."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from litgpt import Config
from litgpt.model import GPT
from torch import Tensor

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.host.placement import device_named, dtype_named
from kvkeep.host.progress import Progress, silent
from kvkeep.host.registry import load_tokenizer
from kvkeep.litgpt.lora import CONFIG, put_on, read_adapter

WEIGHTS = "lit_model.pth"

_MOST_POSITIONS = 1 << 24
"""Largest context length; bounds the rotary table, whose size a file declares."""


def load(
    name: str | None,
    dtype: str = "auto",
    device: str | None = None,
    progress: Progress = silent,
    *,
    adapter: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[GPT, Any]:
    """Load the model and the tokenizer of a LitGPT checkpoint directory. torch reads the weights
    with `weights_only=True`, so no code in the file runs.

    Args:
        name: the directory, with `model_config.yaml`, `lit_model.pth` and a tokenizer's files.
        dtype: "auto" (the checkpoint's dtype) or a torch dtype, such as float32 or bf16.
        device: a torch device; None: the accelerator if there is one, else the CPU.
        adapter: directory of an adapter written by `kvkeep finetune`.
        labels: must be None: LitGPT has no classification head.

    Returns:
        The model, in evaluation mode, and transformers' tokenizer.

    Raises:
        UnsupportedError: a file is missing or damaged, or `labels` are given.
        ModelError: the dtype or device does not exist, or the tokenizer is missing.
    """
    if labels is not None:
        raise UnsupportedError(
            "LitGPT has no classification models; classify with --host transformers"
        )
    directory = Path(name or "")
    kind = None if dtype == "auto" else dtype_named(dtype)
    place = device_named(device)
    missing = [file for file in (CONFIG, WEIGHTS) if not (directory / file).is_file()]
    if not name or missing:
        raise UnsupportedError(
            f"no LitGPT checkpoint in {name or 'no directory'}: there is no "
            f"{' and no '.join(missing or [CONFIG])}; give a directory that litgpt download or "
            "litgpt convert_to_litgpt made"
        )
    tokenizer = load_tokenizer(str(directory))
    added = None if adapter is None else read_adapter(Path(adapter))
    progress(f"loading {name}", None)
    weights = _weights(directory / WEIGHTS)
    gpt = _built(directory, weights)
    gpt.to(device=place, dtype=kind)
    gpt.cos, gpt.sin = gpt.rope_cache(device=place)  # in full precision
    gpt.checkpoint_dir = directory
    gpt.eval()
    return (gpt if added is None else put_on(gpt, added)), tokenizer


def _weights(path: Path) -> Mapping[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UnsupportedError(
            f"cannot read {path}: {reason_of(error)}; convert the checkpoint again"
        ) from error
    found = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise UnsupportedError(f"{path} is not a state dict of tensors; convert it again")
    return found


def _built(directory: Path, weights: Mapping[str, Tensor]) -> GPT:
    try:
        config = Config.from_file(directory / CONFIG)
        layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
        if config.n_layer != len(layers):  # so that the config cannot set how many layers are built
            raise ValueError(f"n_layer is {config.n_layer}, but there are {len(layers)} layers")
        if not 0 < config.block_size <= _MOST_POSITIONS:
            raise ValueError(f"block_size is {config.block_size}, not 1 to {_MOST_POSITIONS}")
        width = config.qk_head_dim if config.latent_attention else config.head_size
        if not 0 <= config.rope_n_elem <= width:
            raise ValueError(f"there are {config.rope_n_elem} rotated dimensions of {width}")
        with torch.device("meta"):
            gpt = GPT(config)
        gpt.load_state_dict(dict(weights), assign=True)
        gpt.cos = gpt.sin = torch.empty(0)  # the caller computes both on the model's device
    except Exception as error:  # a config may contain any fields
        raise UnsupportedError(
            f"{directory / CONFIG} does not describe {WEIGHTS}: {reason_of(error)}"
        ) from error
    return gpt
