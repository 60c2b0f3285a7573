"""PEFT's LoRA: an adapter is trained, the model's own weights do not change."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.extras import needed_by
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.trained import Trained
from kvkeep.host.adapters import adapter_layers
from kvkeep.host.tensors import named_weights

with needed_by("kvkeep.finetune", "finetune"):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

LABELS = "labels.json"
"""The file beside an adapter with the class names by number, which PEFT's config lacks."""

_TASKS = {"text": "CAUSAL_LM", "classify": "SEQ_CLS"}
_NAME = "default"  # PEFT's name for an unnamed adapter


class Lora(Trained):
    """Trains a PEFT adapter; the result has PEFT's files."""

    noun = "adapter"
    weights_file = "adapter_model.safetensors"
    mark = "adapter_config.json"

    def prepare(self, model: Any, options: Options) -> Any:
        if adapter_layers(model):
            raise OptionError("the model already has an adapter; give its base model")
        assert options.rank is not None
        assert options.alpha is not None
        assert options.dropout is not None
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=options.named_targets,
            task_type=_TASKS[options.task],
        )
        self._labels = model.config.id2label if options.task == "classify" else None
        try:
            with warnings.catch_warnings():
                # PEFT's use of transformers raises these warnings.
                warnings.simplefilter("ignore", FutureWarning)
                return get_peft_model(model, config)
        except ValueError as error:
            reason = " ".join(str(error).split())
            what = f"no LoRA for targets {options.targets!r}: {reason}"
            raise OptionError(f"{what}; use all-linear, or names of linear modules") from error

    def weights(self, model: Any) -> dict[str, Tensor]:
        # By default, save_embedding_layers asks the hub for the base model's vocabulary.
        found: dict[str, Tensor] = get_peft_model_state_dict(
            model, named_weights(model), save_embedding_layers=False
        )
        return found

    def describe(self, model: Any, directory: Path) -> None:
        config = copy.copy(model.peft_config[_NAME])
        config.inference_mode = True
        config.save_pretrained(directory)
        if self._labels is not None:
            (directory / LABELS).write_text(json.dumps(self._labels))
