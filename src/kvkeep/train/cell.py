"""What a layer's attention does with a chunk, on the way forward and back.

Each class is a `Step` of `hf.apart`: `step(q, k, v, position, scale=..., softcap=..., sinks=...)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Options, Segment, View, dispatch
from kvkeep.codec import Plain
from kvkeep.layer.history import Ledger
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, limits
from kvkeep.policy import Need, Observation
from kvkeep.train.slots import HeldSlots


class Recorder:
    """A layer's step on the way forward, as `Cell` will compute it again.

    `before` and `after` are the positions of what was evicted before the chunk was attended to, and
    after: int32 (B, 1|H, c) each.
    """

    def __init__(self, layer: LayerCache) -> None:
        self.window, self._layer = layer.window, layer

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **asked: Any) -> Tensor:
        """As `LayerCache.step`."""
        layer, policy, options = self._layer, self._layer.policy, Options(**asked)
        self.before = layer.evicted = []
        view = layer.extend(k, v, position)
        self.after = layer.evicted = []
        mass = None
        if Need.MASS in policy.needs:
            shown = options._replace(need_mass=True, observed=policy.observed)
            mass = dispatch(q, view, shown)[1]
        out = dispatch(q, view, options, differentiable=True)[0]
        layer.settle(Observation(mass, queries=q, scale=options.scale))
        return out


class Captured(Exception):  # noqa: N818 - no error, but the way out of a layer
    """Keys and values of a chunk are known; the rest of the layer need not run."""

    def __init__(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        super().__init__()
        self.found = k, v, position


class Capture:
    """Ends a layer where its attention would begin."""

    def __init__(self, layer: LayerCache) -> None:
        self.window, self._layer = layer.window, layer

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **asked: Any) -> Tensor:
        """Raise Captured, with keys and values as slots hold them."""
        raise Captured(*encoded(self._layer, k, v), position)


class Cell:
    """Attention of one chunk to the slots held before it, with gradients for those too.

    `keys` and `values` are then the chunk's own, as slots hold them, in the graph.

    Args:
        before: what has passed before the chunk.
    """

    def __init__(self, layer: LayerCache, past: HeldSlots | None, before: Ledger) -> None:
        self.window, self._layer, self._before = layer.window, layer, before
        self.past = past and past._replace(
            keys=past.keys.detach().requires_grad_(), values=past.values.detach().requires_grad_()
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **asked: Any) -> Tensor:
        """As `LayerCache.step`, but nothing is kept."""
        self.keys, self.values = keys, values = encoded(self._layer, k, v)
        rows, n = k.shape[0], k.shape[2]
        place = position.reshape(-1, 1, n).to(torch.int32)
        if self.past is not None:
            keys = torch.cat([self.past.keys, keys], dim=2)
            values = torch.cat([self.past.values, values], dim=2)
            before = self.past.position
            place = torch.cat([before, place.expand(rows, before.shape[1], n)], dim=2)
        policy = self._layer.policy
        after, queries = self._before.feed(position, rows)
        if not policy.shows_padding:
            queries = position.expand_as(queries)
        reaches = limits(policy.reach, self.window, n, keys.shape[2], after.columns)
        segment = Segment({"k": keys, "v": values, POSITION: place}, Plain(), Plain())
        ragged = after.pads is not None or policy.ragged
        view = View((segment,), queries, ragged, tuple(reaches))
        return dispatch(q, view, Options(**asked), differentiable=True)[0]


def encoded(layer: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as slots hold new ones."""
    keys, values = layer.key_codec, layer.value_codec
    if keys.block > 1:
        return k, v
    return keys.decode(keys.encode(k), k.dtype), values.decode(values.encode(v), v.dtype)
