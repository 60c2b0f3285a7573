"""LitGPT's LoRA: an adapter is trained, the model's own weights do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.trained import Trained
from kvkeep.litgpt.lora import ADAPTER, PICKLE, adapted, adapter_weights, describe_adapter


class LitGPTLora(Trained):
    """Trains a LitGPT adapter; the result has LitGPT's files, and the tensors as safetensors."""

    noun = "adapter"
    weights_file = ADAPTER
    mark = PICKLE

    def prepare(self, model: Any, options: Options) -> Any:
        assert options.rank is not None
        assert options.alpha is not None
        targets = options.named_targets
        if options.offload:
            what = "LitGPT's adapter file cannot be written from shards"
            raise OptionError(f"{what}; leave out --offload, or use --host transformers")
        try:
            return adapted(
                model,
                rank=options.rank,
                alpha=options.alpha,
                dropout=options.dropout or 0.0,
                targets=None if isinstance(targets, str) else targets,
            )
        except UnsupportedError as error:
            raise OptionError(str(error)) from error

    def weights(self, model: Any) -> dict[str, Tensor]:
        return adapter_weights(model)

    def describe(self, model: Any, directory: Path) -> None:
        describe_adapter(model, directory)
