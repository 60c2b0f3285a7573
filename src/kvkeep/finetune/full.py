"""Full training: all weights of a model are trained; the result is a model directory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.trained import Trained
from kvkeep.host.adapters import adapter_layers
from kvkeep.host.tensors import named_weights


class Full(Trained):
    """Trains a whole model; the result has the files from which transformers loads it.

    Args:
        tokenizer: the model's tokenizer, saved with the model.
    """

    noun = "model"
    weights_file = "model.safetensors"
    mark = "config.json"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prepare(self, model: Any, options: Options) -> Any:
        if adapter_layers(model):
            raise OptionError("the model has an adapter; give its base model, or merge it first")
        if not hasattr(getattr(model, "config", None), "save_pretrained"):
            what = f"{type(model).__name__} has no config that can be saved"
            raise OptionError(f"{what}; train an adapter")
        odd = [name for name, p in model.named_parameters() if not p.is_floating_point()]
        if odd or getattr(model.config, "quantization_config", None) is not None:
            what = f"{type(model).__name__} has quantized weights, which have no gradients"
            raise OptionError(f"{what}; train an adapter, or load it without quantization")
        # Sharding changes the model's class, so the class name is saved now.
        self._config = copy.deepcopy(model.config)
        self._config.architectures = [type(model).__name__]
        self._config.dtype = next(model.parameters()).dtype
        return model.requires_grad_(True)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        once: dict[int, tuple[str, Tensor]] = {}
        for name, x in named_weights(model).items():
            once.setdefault(id(x), (name, x))  # tied weights have several names
        return dict(once.values())

    def describe(self, model: Any, directory: Path) -> None:
        self._config.save_pretrained(directory)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
