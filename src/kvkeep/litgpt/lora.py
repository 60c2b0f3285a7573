"""LitGPT's LoRA on a model in memory, and adapter files that LitGPT can also read.

LitGPT stores an adapter as a pickle, `lit_model.pth.lora`. kvkeep reads a safetensors file beside
it instead; it writes the pickle only for LitGPT's own commands.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from litgpt import Config, lora
from litgpt.model import GPT
from litgpt.utils import save_config
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kvkeep.errors import UnsupportedError, reason_of
from kvkeep.host.tensors import named_weights
from kvkeep.reading import read_file

ADAPTER = "lit_model.lora.safetensors"
_MOST_SETTINGS, _MOST_WEIGHTS = 1 << 20, 1 << 36  # bytes
CONFIG, PICKLE, SETTINGS = "model_config.yaml", "lit_model.pth.lora", "hyperparameters.yaml"
TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
TARGETS = ("query", "key", "value", "projection", "mlp", "head")
"""The parts that LitGPT can adapt: query, key, value and output projections of attention, the
feed-forward layers, and the language model head."""

_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", *(f"lora_{name}" for name in TARGETS))


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter's files: LitGPT's settings, and tensors by LitGPT's names."""

    directory: Path
    settings: dict[str, Any]
    weights: dict[str, Tensor]


def adapted(
    gpt: GPT, *, rank: int, alpha: int, dropout: float = 0.0, targets: list[str] | None = None
) -> lora.GPT:
    """Add a new adapter to a model, without a change of its outputs. The result shares the weights
    of `gpt`, which are frozen; the adapter has their dtype.

    Args:
        targets: names from `TARGETS`; None: all but the head.

    Raises:
        UnsupportedError: a target does not exist, or the model already has an adapter.
    """
    chosen = list(TARGETS[:-1]) if targets is None else targets
    if unknown := set(chosen) - set(TARGETS):
        raise UnsupportedError(
            f"LitGPT has no LoRA for {', '.join(sorted(unknown))}; use {', '.join(TARGETS)}"
        )
    if type(gpt) is not GPT:
        raise UnsupportedError(
            f"the model is a {type(gpt).__module__}.{type(gpt).__name__}; give a litgpt.model.GPT"
        )
    settings: dict[str, Any] = {"lora_r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    return _with_adapter(gpt, settings | {f"lora_{name}": name in chosen for name in TARGETS})


def adapter_weights(gpt: lora.GPT) -> dict[str, Tensor]:
    """The adapter's tensors, by LitGPT's names. They share the model's memory."""
    named = named_weights(gpt)
    return {name: x for name, x in named.items() if lora.lora_filter(name, x)}


def describe_adapter(gpt: lora.GPT, directory: Path) -> None:
    """Write all adapter files but `ADAPTER`: the config and the settings, LitGPT's own adapter
    file, and the tokenizer of the model's checkpoint. `litgpt merge_lora` accepts the directory."""
    base: Path | None = getattr(gpt, "checkpoint_dir", None)
    plain = {name: x for name, x in asdict(gpt.config).items() if name not in _SETTINGS}
    save_config(Config(**plain), directory)
    if base is not None:
        for file in (base / name for name in TOKENIZER):
            if file.exists():
                shutil.copy(file, directory / file.name)
    weights = {name: x.detach().cpu() for name, x in adapter_weights(gpt).items()}
    torch.save({"model": weights}, directory / PICKLE)
    settings = {name: getattr(gpt.config, name) for name in _SETTINGS}
    settings["checkpoint_dir"] = "" if base is None else str(base)
    (directory / SETTINGS).write_text(json.dumps(settings, indent=2))  # JSON is YAML


def with_adapter(gpt: GPT, directory: Path) -> lora.GPT:
    """Put an adapter written by `kvkeep finetune` on a model; the result shares the weights of
    `gpt`.

    Raises:
        UnsupportedError: the files are missing or damaged, or belong to another model.
    """
    return put_on(gpt, read_adapter(directory))


def read_adapter(directory: Path) -> Adapter:
    """Read the files of an adapter written by `kvkeep finetune`.

    Raises:
        UnsupportedError: the files are missing or damaged.
    """
    try:
        given = json.loads(read_file(directory / SETTINGS, _MOST_SETTINGS))
        settings = {name: given[name] for name in _SETTINGS}
        weights = load(bytes(read_file(directory / ADAPTER, _MOST_WEIGHTS)))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UnsupportedError(
            f"cannot read the adapter in {directory}: {reason_of(error)}"
        ) from error
    _require_settings(settings, directory)
    return Adapter(directory, settings, weights)


def put_on(gpt: GPT, adapter: Adapter) -> lora.GPT:
    """Put an adapter on a model; the result shares the weights of `gpt`.

    Raises:
        UnsupportedError: the adapter belongs to another model.
    """
    # Compare before allocating: the file declares the sizes of its tensors.
    planned = adapter_weights(_planned(gpt, adapter.settings))
    _require_same(adapter.weights, planned, adapter.directory)
    model = _with_adapter(gpt, adapter.settings)
    with torch.no_grad():
        for name, x in adapter_weights(model).items():
            x.copy_(adapter.weights[name])
    return model.eval()


def _planned(gpt: GPT, settings: Mapping[str, Any]) -> lora.GPT:
    """A model with an adapter on the meta device."""
    config = lora.Config(**asdict(gpt.config), **settings)
    with torch.device("meta"):
        return lora.GPT(config)


def _with_adapter(gpt: GPT, settings: Mapping[str, Any]) -> lora.GPT:
    found = _planned(gpt, settings)
    found.load_state_dict(named_weights(gpt), strict=False, assign=True)
    for module in found.modules():
        fresh = [name for name, p in module._parameters.items() if p is not None and p.is_meta]
        for name in fresh:
            p = torch.empty_like(module._parameters[name], device=gpt.lm_head.weight.device)
            module._parameters[name] = torch.nn.Parameter(p.to(gpt.lm_head.weight.dtype))
        if fresh:
            module.reset_parameters()
    found.max_seq_length = gpt.max_seq_length
    found.cos, found.sin = gpt.cos, gpt.sin
    found.checkpoint_dir = getattr(gpt, "checkpoint_dir", None)
    lora.mark_only_lora_as_trainable(found)
    return found.train(gpt.training)


def _require_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """Raise UnsupportedError if an adapter's settings from a file have wrong types or values."""
    limits: dict[str, tuple[type, float]] = dict.fromkeys(_SETTINGS, (bool, 1.0))
    limits.update(lora_r=(int, 1 << 16), lora_alpha=(int, 1 << 31), lora_dropout=(float, 1.0))
    for name, (kind, most) in limits.items():
        value = settings[name]
        fits = type(value) is kind  # bool is a subclass of int, but not accepted as a number
        if not fits or not 0 <= value <= most:
            raise UnsupportedError(
                f"{directory / SETTINGS}: {name} is {value!r:.40}, not a {kind.__name__} of at "
                f"most {most}"
            )


def _require_same(given: Mapping[str, Tensor], own: Mapping[str, Tensor], directory: Path) -> None:
    """Raise UnsupportedError if tensors differ from a model's adapter in names or shapes."""
    shapes = [{name: tuple(x.shape) for name, x in one.items()} for one in (given, own)]
    if shapes[0] != shapes[1]:
        odd = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))[:3]
        raise UnsupportedError(
            f"the adapter in {directory} is for another model: {', '.join(odd)} differ"
        )
