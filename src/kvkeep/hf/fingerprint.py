"""Fingerprint: what the keys and values of a model depend on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn

from kvkeep.hf.config import base_config, decoder_config

_known: WeakKeyDictionary[nn.Module, tuple[object, dict[str, str]]] = WeakKeyDictionary()


def fingerprint(model: nn.Module, tokenizer: Any = None) -> dict[str, str]:
    """What the keys and values of a model depend on, as hashes and as text.

    Hashing weights takes a second for some gigabytes, so it is done again only when they changed.

    Returns:
        `weights`, `adapter` ("none", or a hash of what is active), `rope`, `dtype`, and `tokenizer`
        if one is given.
    """
    tensors = dict(_tensors(model))
    try:
        state: object = [(name, x.data_ptr(), x._version) for name, x in tensors.items()]
    except RuntimeError:  # inference tensors count no changes
        state = None
    active = sorted(_adapters(model))
    known = _known.get(model)
    if state is not None and known is not None and known[0] == (state, active):
        found = dict(known[1])
    else:
        found = _fingerprint(model, tensors, active)
        _known[model] = ((state, active), dict(found))
    if tokenizer is not None:
        found["tokenizer"] = _hash_of_tokenizer(tokenizer)
    return found


def _fingerprint(model: nn.Module, tensors: dict[str, Tensor], active: list[str]) -> dict[str, str]:
    weights, adapter = xxhash.xxh3_128(), xxhash.xxh3_128()
    for name in sorted(tensors):
        # As the model without adapters calls it.
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        parts = plain.split(".")
        if any(part in active for part in parts):
            _add(adapter, plain, tensors[name])
        elif not any(part.startswith("lora_") for part in parts):
            _add(weights, plain, tensors[name])
    config = decoder_config(base_config(model))
    rope = getattr(config, "rope_parameters", None)
    dtypes = sorted({str(x.dtype) for x in model.parameters() if x.is_floating_point()})
    return {
        "weights": weights.hexdigest(),
        "adapter": adapter.hexdigest() if active else "none",
        "rope": json.dumps(rope, sort_keys=True, default=str),
        "dtype": " ".join(dtypes),
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once."""
    seen = set()
    for name, x in model.state_dict(keep_vars=True).items():
        place = (x.data_ptr(), tuple(x.shape))
        if place not in seen or not x.numel():
            seen.add(place)
            yield name, x


def _add(to: Any, name: str, x: Tensor) -> None:
    to.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
    flat = x.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        to.update(flat.view(torch.uint8).numpy().data)


def _adapters(model: nn.Module) -> set[str]:
    """Names of the PEFT adapters that take part in the model's forward."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return set()
    return {
        name
        for module in model.modules()
        if isinstance(module, peft.BaseTunerLayer) and not module.disable_adapters
        for name in module.active_adapters
    }


def _hash_of_tokenizer(tokenizer: Any) -> str:
    """Of its vocabulary, special tokens and chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    parts = [vocabulary, str(tokenizer.special_tokens_map), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
