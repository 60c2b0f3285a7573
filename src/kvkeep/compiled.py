"""Steps inside a compiled graph: one opaque operation each, so that nothing of a cache is traced.

A graph knows a layer by its ticket, a small tensor that leads to it while it runs. So one graph
serves any cache of a model, whatever its length, and no Python number of a cache is compiled in.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.layer import LayerCache

_layers: WeakValueDictionary[int, LayerCache] = WeakValueDictionary()
_numbers = count(1)


def ticket_of(layer: LayerCache) -> Tensor:
    """A new ticket: int64 (1,), valid as long as the layer lives."""
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):
        return torch.tensor([number])


def _layer(ticket: Tensor) -> LayerCache:
    layer = _layers.get(int(ticket))
    if layer is None:
        raise StateError("this graph was given a cache that is gone, or from another process")
    return layer


@torch.library.custom_op("kvkeep::fed", mutates_args=("ticket",))
def fed(ticket: Tensor) -> Tensor:
    """Columns the layer was fed, int64 (). (It is said to change the ticket to keep its place.)"""
    return torch.tensor(_layer(ticket).fed)


@fed.register_fake
def _(ticket: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("kvkeep::next_positions", mutates_args=("ticket",))
def next_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    """Positions of the next n tokens, int32 (n,); (B, n) with -1 for padding where `real`, (B, n),
    says what is not."""
    layer = _layer(ticket)
    if real is None:
        return layer.next_positions(n, device).clone()
    position = layer.next_positions(n, device, None if bool(real.all()) else real)
    return position.expand(real.shape).clone()


@next_positions.register_fake
def _(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty((n,) if real is None else real.shape, dtype=torch.int32, device=device)


@torch.library.custom_op("kvkeep::step", mutates_args=("ticket",))
def step(
    ticket: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`LayerCache.step`."""
    layer = _layer(ticket)
    if position.dim() == 2 and not layer.padded and bool((position >= 0).all()):
        position = position[0]  # the rows are alike
    out = layer.step(q, k, v, position, scale=scale, softcap=softcap, sinks=sinks)
    return out.contiguous()


@step.register_fake
def _(ticket: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))
