"""Compare a saved cache's transformers model with a model of another library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import KVKeepError, OutOfMemoryError, reason_of
from kvkeep.host.contract import Host
from kvkeep.host.fingerprint import LIBRARY, differences
from kvkeep.host.registry import host_of
from kvkeep.libraries import loader_of
from kvkeep.planes import Chunks
from kvkeep.rotary import Rotary

_TOKENS = 16
"""Tokens whose keys and values are compared."""

_SAME_FREQUENCY = 1e-6
"""Largest relative difference of equal rotary frequencies, by rounding in float32."""

_CLOSE = 1e-3
_CLOSE_IN_HALF = 0.05
"""Largest relative differences between the results of two libraries, by rounding."""


def translated(saved: Mapping[str, str], host: Host, tokenizer: Any = None) -> list[str] | None:
    """The differences between a model of another library and the transformers model with a recorded
    fingerprint.

    The config in the fingerprint must have the fields that the host knows, with equal values. Then
    the transformers model is rebuilt from that config and the host's weights. The models are the
    same if the rebuilt model has the recorded fingerprint, and if both models have the same
    windows, rotary frequencies, and keys and values of a few tokens (within the tolerance of the
    weights' dtype).

    Returns:
        The differences; empty if there are none. None if the fingerprint is not of a transformers
        model, or if the host does not know its layout.
    """
    kind = _kind(saved)
    known = None if kind is None else host.as_transformers(kind)
    if known is None:
        return None
    weights, fields = known
    if other_fields := _other_fields(saved, fields):
        return other_fields
    try:
        build = loader_of("transformers").rebuilt
        model = build(saved, weights, layers=len(host.kinds), positions=host.context or 1 << 20)
        other = host_of(model)
        return differences(saved, other.fingerprint(tokenizer)) or _computed(host, other)
    except (OutOfMemoryError, torch.OutOfMemoryError, MemoryError):
        raise
    except KVKeepError as error:
        return [str(error)]
    except Exception as error:  # a model built from a file may fail in any way
        return [f"its model cannot compute: {type(error).__name__}: {reason_of(error)}"]


def _kind(saved: Mapping[str, str]) -> str | None:
    """The model type in the fingerprint of a transformers model; None for other models."""
    try:
        kind = json.loads(saved["config"])["model_type"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return kind if isinstance(kind, str) and LIBRARY not in saved else None


def _other_fields(saved: Mapping[str, str], fields: Mapping[str, Any]) -> list[str]:
    """The fields of a recorded config that differ from a model's fields."""
    try:
        recorded = {**json.loads(saved["config"]), "rope_parameters": json.loads(saved["rope"])}
    except (KeyError, TypeError, ValueError, RecursionError):
        return ["its config cannot be read"]
    return [
        f"its {name} is {recorded.get(name)!r:.200}, not {value!r}"
        for name, value in fields.items()
        if recorded.get(name) != value
    ]


def _computed(one: Host, other: Host) -> list[str]:
    """The results of two models that differ."""
    windows, others = (
        [(k.window, isinstance(k.window, Chunks)) for k in host.kinds] for host in (one, other)
    )
    if windows != others:
        return ["its layers have different windows"]
    turns = zip(one.rotaries(), other.rotaries(), strict=True)
    if not all(_same_rotary(mine, theirs) for mine, theirs in turns):
        return ["it rotates keys differently"]
    half = one.geometries()[0].dtype.itemsize < torch.float32.itemsize
    most = _CLOSE_IN_HALF if half else _CLOSE
    pairs = zip(_keys_and_values(one), _keys_and_values(other), strict=True)
    for index, (of_one, of_other) in enumerate(pairs):
        for name, x, y in zip(("keys", "values"), of_one, of_other, strict=True):
            if x.shape != y.shape or not float((x - y).norm()) <= most * float(y.norm()):
                return [f"it computes different {name} in layer {index}"]
    return []


def _same_rotary(one: Rotary | None, other: Rotary | None) -> bool:
    if one is None or other is None:
        return one is other
    x, y = one.inv_freq.cpu().float(), other.inv_freq.cpu().float()
    close = x.shape == y.shape and torch.allclose(x, y, _SAME_FREQUENCY, 0)
    return close and one.interleaved == other.interleaved


@torch.no_grad()
def _keys_and_values(host: Host) -> list[tuple[Tensor, Tensor]]:
    """The keys and values, (1, H, n, D), of each layer for a few tokens."""
    with nullcontext() if host.attached else host.attach(linears=False):
        cache = host.new_cache()
        host.feed(torch.arange(_TOKENS, device=host.device)[None] % host.vocabulary, cache)
    found = [held for layer in cache.layers if (held := layer.held()) is not None]
    return [(held.keys.cpu(), held.values.cpu()) for held in found]
