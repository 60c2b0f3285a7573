"""Whether a cache that a model of transformers made is one of the same weights in another library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.host.contract import Host
from kvkeep.host.fingerprint import differences
from kvkeep.host.registry import host_of

_TOKENS = 8
"""Tokens at the beginning, and at the end, of the positions at which keys are compared."""

_DEFAULT_CONTEXT = 4096
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
_CLOSE_IN_HALF = 0.05


def translated(saved: Mapping[str, str], host: Host, tokenizer: Any = None) -> list[str] | None:
    """How a model differs from the model of transformers that gave a fingerprint, although their
    weights are laid out otherwise.

    The model of transformers is built again: with the config in the fingerprint, and the host's
    weights, which are shared. It is the same if its whole fingerprint is the recorded one, and if it
    computes the same keys and values as the host's model, for a few tokens at the first and last
    positions.

    Returns:
        The differences; empty if there are none. None if the fingerprint is not of a model of
        transformers, or if the host does not know its layout.
    """
    kind = _kind(saved)
    weights = None if kind is None else host.as_transformers(kind)
    if weights is None:
        return None
    context = host.context or _DEFAULT_CONTEXT
    try:
        rebuilt = import_module("kvkeep.hf.rebuilt").rebuilt
        other = host_of(rebuilt(saved, weights, layers=len(host.kinds), positions=context))
        found = differences(saved, other.fingerprint(tokenizer))
        if found:
            return found
        own, theirs = (_keys_and_values(one, context) for one in (host, other))
    except KVKeepError as error:
        return [str(error)]
    most = _CLOSE.get(own[0].dtype, _CLOSE_IN_HALF)
    for index, (x, y) in enumerate(zip(own, theirs, strict=True)):
        if x.shape != y.shape or not float((x - y).norm()) <= most * float(y.norm()):
            what = "values" if index % 2 else "keys"
            return [f"it computes other {what} in layer {index // 2}"]
    return []


def _kind(saved: Mapping[str, str]) -> str | None:
    """The type of the model of transformers that gave a fingerprint; None: it was none."""
    try:
        kind = json.loads(saved["config"])["model_type"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return kind if isinstance(kind, str) and "rope" in saved else None


@torch.no_grad()
def _keys_and_values(host: Host, context: int) -> list[Tensor]:
    """The keys and values of each layer for a text at the first and last positions."""
    few = min(_TOKENS, context // 2)
    position = torch.cat([torch.arange(few), torch.arange(context - few, context)])
    ids = torch.arange(2 * few)[None] % host.vocabulary
    with nullcontext() if host.attached else host.attach():
        cache = host.new_cache()
        host.feed(ids.to(host.device), cache, position=position.to(host.device))
    held = [layer.held() for layer in cache.layers]
    return [x.cpu() for one in held for x in (one.keys, one.values)]
