"""PEFT's LoRA: added to a model, written to files, and read from them without pickle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.extras import needed_by
from kvkeep.finetune.options import OptionError, Options
from kvkeep.host.adapters import adapter_layers

with needed_by("kvkeep.finetune", "finetune"):
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

FILES = ("adapter_model.safetensors", "adapter_config.json")
"""The files that PEFT reads; it recognises an adapter by the last."""


def with_adapter(model: Any, options: Options) -> Any:
    """The model with a new adapter; only the adapter's parameters require gradients.

    Raises:
        OptionError: the model has none of the target modules, or has an adapter already.
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
            warnings.simplefilter("ignore", FutureWarning)  # raised by how PEFT uses transformers
            return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise OptionError(
            f"no LoRA for targets {options.targets!r}: {reason}; use all-linear, or names of the "
            "model's linear modules"
        ) from error


def write(model: Any, directory: Path) -> None:
    """Write the files of a model's adapter, and no others."""
    # "auto", the default, would ask the hub for the base model's vocabulary.
    model.save_pretrained(directory, save_embedding_layers=False)
    for path in directory.iterdir():
        if path.name not in FILES:  # an empty model card
            path.unlink()


def weights_of(model: Any) -> dict[str, Tensor]:
    """The adapter's weights, by their names in its file."""
    found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def set_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Set the adapter's weights, by their names in its file."""
    set_peft_model_state_dict(model, weights)
