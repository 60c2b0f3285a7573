"""Make a few channels of a model's keys much larger than the rest, as in some models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kvkeep.errors import UnsupportedError


@contextmanager
def large_channels(model: Any, kind: str, times: float = 30.0, seed: int = 0) -> Iterator[None]:
    """A context in which a few channels of each kv head's keys are `times` larger.

    `scaled` and `turned` do not change what the model computes in full precision: queries are
    divided by what keys are multiplied by. `bias` does, so compare with the biased model's full
    cache.

    Args:
        model: its attention must have q_proj, k_proj and `apply_rotary_pos_emb` (Llama, Qwen2).
        kind: `scaled`: the weights of a rotary pair of any frequency, before the rotary embedding;
            `turned`: two single channels, after the rotary embedding; `bias`: a constant added
            before it to a pair in the lowest quarter of frequencies, as in Qwen2.5.
        times: the factor; for `bias`, the bias divided by the root mean square of the layer's
            keys.
        seed: determines the channels.

    Raises:
        UnsupportedError: the kind is unknown, or the model has another structure.
    """
    plant = _PLANTS.get(kind)
    if plant is None:
        raise UnsupportedError(f"no large channels of kind {kind!r}; use {', '.join(_PLANTS)}")
    found = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    if not found or not hasattr(sys.modules[type(found[0]).__module__], "apply_rotary_pos_emb"):
        raise UnsupportedError(
            f"{type(model).__name__} has no q_proj, k_proj and apply_rotary_pos_emb; use a Llama "
            "or Qwen2"
        )
    projections = [p for m in found for p in (m.q_proj, m.k_proj)]
    before = [(p, p.weight.data.clone(), p.bias) for p in projections]
    random = torch.Generator().manual_seed(seed)
    try:
        with ExitStack() as stack, torch.no_grad():
            plant(model, found, times, random, stack)
            yield
    finally:
        for projection, weight, bias in before:
            projection.weight.data.copy_(weight)
            projection.bias = bias


def _scaled(
    model: Any, layers: list[Any], times: float, random: torch.Generator, stack: ExitStack
) -> None:
    for layer in layers:
        half, factor = layer.head_dim // 2, torch.ones(_heads(layer), layer.head_dim)
        for head in factor:
            first = int(torch.randint(half, (), generator=random))
            head[[first, first + half]] = times
        group = layer.q_proj.out_features // layer.k_proj.out_features
        divided = 1 / factor.repeat_interleave(group, dim=0)
        for projection, by in ((layer.k_proj, factor), (layer.q_proj, divided)):
            by = by.flatten().to(projection.weight)
            projection.weight.mul_(by[:, None])
            if projection.bias is not None:
                projection.bias = nn.Parameter(projection.bias * by)


def _turned(
    model: Any, layers: list[Any], times: float, random: torch.Generator, stack: ExitStack
) -> None:
    module = sys.modules[type(layers[0]).__module__]
    turn: Callable[..., tuple[Tensor, Tensor]] = module.apply_rotary_pos_emb
    factor = torch.ones(layers[0].head_dim)
    factor[torch.randperm(layers[0].head_dim, generator=random)[:2]] = times

    def turned(q: Tensor, k: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        q, k = turn(q, k, *args, **options)
        return q / factor.to(q), k * factor.to(k)

    stack.enter_context(patch.object(module, "apply_rotary_pos_emb", turned))


def _biased(
    model: Any, layers: list[Any], times: float, random: torch.Generator, stack: ExitStack
) -> None:
    for layer, size in zip(layers, _key_sizes(model, layers), strict=True):
        half = layer.head_dim // 2
        bias = torch.zeros(_heads(layer), layer.head_dim)
        for head in bias:
            first = half - 1 - int(torch.randint(max(1, half // 4), (), generator=random))
            angle = torch.rand((), generator=random) * 2 * torch.pi
            head[first], head[first + half] = angle.cos(), angle.sin()
        own = layer.k_proj.bias
        bias = (times * size * bias).flatten().to(layer.k_proj.weight)
        layer.k_proj.bias = nn.Parameter(bias if own is None else own + bias)


def _key_sizes(model: Any, layers: list[Any]) -> list[float]:
    """The root mean square of each layer's keys, on some tokens."""
    sizes: list[float] = []

    def note(module: nn.Module, given: Any, keys: Tensor) -> None:
        sizes.append(float(keys.float().pow(2).mean().sqrt()))

    tokens = torch.arange(64, device=model.device) * 97 % model.config.vocab_size
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.k_proj.register_forward_hook(note))
        model(tokens[None], use_cache=False)
    return sizes


def _heads(layer: Any) -> int:
    return int(layer.k_proj.out_features // layer.head_dim)


_PLANTS: dict[str, Callable[..., None]] = {"scaled": _scaled, "turned": _turned, "bias": _biased}
