"""Finds PEFT adapters in directories, checks them, and loads them into a model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load
from transformers import PreTrainedModel

from kvkeep.errors import KVKeepError, reason_of
from kvkeep.extras import needed_by
from kvkeep.host.tensors import named_weights
from kvkeep.reading import read_file

_MOST_CONFIG, _MOST_WEIGHTS = 1 << 20, 1 << 36
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterError(KVKeepError, ValueError):
    """An adapter does not exist, or cannot be loaded into a model."""


def is_adapter(name: str) -> bool:
    """Whether a name is a directory that contains an adapter but no complete model."""
    directory = Path(name)
    try:
        return (directory / _CONFIG).is_file() and not (directory / "config.json").exists()
    except OSError:  # the name is too long for a path, or access is denied
        return False


def base_of(directory: str) -> str | None:
    """The name of the model for which an adapter was made, if its config has one.

    Raises:
        AdapterError: there is no adapter, or it is of an unsupported kind.
    """
    base = _config(Path(directory)).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_file(directory / _CONFIG, _MOST_CONFIG))
    except FileNotFoundError as error:
        raise AdapterError(
            f"no adapter in {directory}: it has no {_CONFIG}; give a directory that `kvkeep "
            "finetune` or PEFT wrote"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{directory / _CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(
            f"{directory / _CONFIG} is not an adapter's config; save the adapter again"
        )
    if not (directory / _WEIGHTS).is_file():
        raise AdapterError(
            f"{directory} has no {_WEIGHTS}; save the adapter as safetensors: pickles are not "
            "loaded"
        )
    if config.get("alora_invocation_tokens"):
        raise AdapterError(
            f"{directory} is activated by tokens of a prompt (aLoRA), which needs a store: use "
            "kvkeep.attach(model, store=...) with PEFT's model"
        )
    return config


def with_adapter(model: PreTrainedModel, directory: str) -> PreTrainedModel:
    """Load an adapter into the model's layers; it is active and not merged.

    Raises:
        MissingPackageError: PEFT is not installed.
        AdapterError: the adapter cannot be loaded, or does not fit this model's layers.
    """
    with needed_by("An adapter", "finetune"):
        from peft import (  # noqa: PLC0415 (it may be missing)
            PeftConfig,
            PeftModel,
            get_peft_model_state_dict,
            set_peft_model_state_dict,
        )
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING  # noqa: PLC0415
        from peft.tuners.tuners_utils import BaseTuner  # noqa: PLC0415
    place = Path(directory)
    _config(place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # raised by PEFT's use of transformers
            config = PeftConfig.from_pretrained(directory)
            config.inference_mode = True
            tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
            # Check before creating it: other types may allocate any size, or load other files.
            if not issubclass(tuner or object, BaseTuner) or tuner.forward is not BaseTuner.forward:
                raise AdapterError(
                    f"{directory} is of type {config.peft_type}, which changes more than the "
                    "model's layers; use it with PEFT"
                )
            weights = load(bytes(read_file(place / _WEIGHTS, _MOST_WEIGHTS)))
            # On the meta device, so that a wrong number in its config cannot allocate memory.
            adapted: Any = PeftModel(model, config, low_cpu_mem_usage=True)
            known = get_peft_model_state_dict(
                adapted, named_weights(adapted), save_embedding_layers=False
            )
            missing = sorted(known.keys() - weights.keys())
            weights = {n: x.to(known[n].dtype) if n in known else x for n, x in weights.items()}
            read: Any = set_peft_model_state_dict(adapted, weights, low_cpu_mem_usage=True)
            missing = missing or [n for n, x in adapted.named_parameters() if x.is_meta]
    except AdapterError:
        raise
    except Exception as error:  # PEFT may raise any exception on an invalid config
        raise AdapterError(
            f"cannot load {directory} into {model.name_or_path}: {reason_of(error)}; give the "
            "model it was made for, or save it again"
        ) from error
    odd = list(read.unexpected_keys)
    if missing or odd:
        raise AdapterError(
            f"{directory} does not fit {model.name_or_path}: {len(missing)} weights are missing, "
            f"{len(odd)} belong to no layer, such as {(missing + odd)[0]}; give the model it was "
            "made for"
        )
    found: PreTrainedModel = adapted.get_base_model()
    return found
