"""PEFT's LoRA: put on a model, written, and read without pickles."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.extras import needed_by
from kvkeep.finetune.options import OptionError, Options
from kvkeep.hf.adapters import adapter_layers

with needed_by("kvkeep.finetune", "finetune"):
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

FILES = ("adapter_model.safetensors", "adapter_config.json")
"""What PEFT reads; it knows an adapter by the last."""


def with_adapter(model: Any, options: Options) -> Any:
    """The model with a new adapter, which alone can be trained.

    Raises:
        OptionError: the model has none of the modules, or an adapter.
    """
    if adapter_layers(model):
        raise OptionError("the model has an adapter already; give its base model")
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=options.named_targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
            return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise OptionError(
            f"no LoRA for targets {options.targets!r}: {reason}; use all-linear, or names of the "
            "model's linear modules"
        ) from error


def write(model: Any, directory: Path) -> None:
    """Write the files of a model's adapter, and nothing else."""
    # "auto" would ask the hub for the base model's vocabulary.
    model.save_pretrained(directory, save_embedding_layers=False)
    for path in directory.iterdir():
        if path.name not in FILES:  # a model card to be filled in
            path.unlink()


def weights_of(model: Any) -> dict[str, Tensor]:
    """The adapter's weights, as they are called in its file."""
    found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def set_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """The inverse of `weights_of`."""
    set_peft_model_state_dict(model, weights)
