"""The attention of one layer for one chunk, in the forward and in the backward of training. Each
class is a `ChunkStep` (see `kvkeep.host.layerwise`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Held, Options, Segment, View, dispatch
from kvkeep.codec import Plain
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.sight import Sighted
from kvkeep.layer.step import StepInputs
from kvkeep.planes import POSITION

Pair = tuple[Tensor, Tensor]
"""Keys (B, H, n, Dk) and values (B, H, n, Dv) of a chunk, in the precision of slots: encoded and
decoded by the layer's codecs."""


class Unattending:
    """The step of a layer that does not attend.

    Args:
        states: see `ChunkStep`.
    """

    shared: Pair | None = None
    past: Held | None = None
    """The slots before the chunk, as leaves of the graph."""
    written: tuple[Tensor, ...] = ()
    """The chunk's keys and values, part of the graph, if the layer writes them to its slots."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.states = states

    def run(self, inputs: StepInputs) -> Tensor:
        """Not called."""
        raise NotImplementedError("a layer attends, although its kind has no attention")


class Recorder(Unattending):
    """The forward's step. It records evictions, so that the backward can repeat them.

    `before` and `after`: positions evicted before and after the chunk's attention, one int32
    (B, 1|H, c) for each eviction.
    """

    def __init__(self, layer: LayerCache, states: dict[str, Tensor]) -> None:
        super().__init__(states)
        self._layer = layer

    def sighted(self, queries: Tensor) -> Sighted:
        """See `LayerCache.sighted`."""
        return self._layer.sighted(queries)

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""
        self.before = self._layer.cursor.evicted = []
        self._given = inputs.k, inputs.v
        return self._layer.run(inputs, self._attend)

    @property
    def pair(self) -> Pair:
        """The chunk's keys and values."""
        return encoded(self._layer, *self._given)

    def _attend(self, q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
        """The same operations as in `Cell`, so that both give the same bits. So a separate call
        computes the mass."""
        self.after = self._layer.cursor.evicted = []
        mass = dispatch(q, view, options)[1] if options.need_mass else None
        plain = options._replace(need_mass=False, observed=None)
        return dispatch(q, view, plain, differentiable=True)[0], mass


class Captured(Exception):  # noqa: N818 - not an error
    """Carries a chunk's keys and values out of a layer and skips the rest of the layer."""

    def __init__(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        super().__init__()
        self.found = k, v, position


class Capture(Unattending):
    """Stops a layer before its attention by raising `Captured`."""

    def __init__(self, layer: LayerCache, states: dict[str, Tensor]) -> None:
        super().__init__(states)
        self._layer = layer

    def sighted(self, queries: Tensor) -> Sighted:
        """The chunk alone: the choice does not change the chunk's keys and values."""
        return Sighted.of(None, queries, self._layer.sight)

    def run(self, inputs: StepInputs) -> Tensor:
        """Raise Captured with the keys and values in the precision of slots."""
        assert inputs.position is not None
        raise Captured(*encoded(self._layer, inputs.k, inputs.v), inputs.position)


class Cell(Unattending):
    """The backward's step: attention to the slots before the chunk and to the chunk's own slots,
    with gradients for both.

    Args:
        past: the slots before the chunk.
        before: the history before the chunk.
        states: see `ChunkStep`.
        shared: the earlier layer's keys and values for the chunk, if the layer reads them.
    """

    def __init__(
        self,
        layer: LayerCache,
        past: Held | None,
        before: History,
        states: dict[str, Tensor],
        shared: Pair | None = None,
    ) -> None:
        super().__init__(states)
        self._layer, self._before = layer, before
        if shared is not None:
            keys, values = (x.detach().requires_grad_() for x in shared)
            self.shared = keys, values
        self.past = past and past._replace(
            keys=past.keys.detach().requires_grad_(), values=past.values.detach().requires_grad_()
        )

    def sighted(self, queries: Tensor) -> Sighted:
        """See `LayerCache.sighted`."""
        return Sighted.of(self.past, queries, self._layer.sight)

    def run(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.run`, but writes no slots."""
        assert inputs.position is not None
        keys, values = self.shared or encoded(self._layer, inputs.k, inputs.v)
        if self.shared is None:
            self.written = keys, values
        rows, n = inputs.k.shape[0], inputs.k.shape[2]
        place = inputs.position.reshape(-1, 1, n).to(torch.int32)
        if self.past is not None:
            keys = torch.cat([self.past.keys, keys], dim=2)
            values = torch.cat([self.past.values, values], dim=2)
            before = self.past.position
            place = torch.cat([before, place.expand(rows, before.shape[1], n)], dim=2)
        layer = self._layer
        after, queries = self._before.feed(
            inputs.position, rows, shows_padding=layer.policy.shows_padding
        )
        segment = Segment({"k": keys, "v": values, POSITION: place}, Plain(), Plain())
        view = layer.sight.after((segment,), queries, after, keys.shape[2])
        view = view._replace(chosen=inputs.chosen)
        options = inputs.options(layer.slopes)
        return dispatch(inputs.q, view, options, differentiable=True)[0]


def encoded(layer: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New keys and values, encoded and decoded by the layer's codecs. Codecs of several tokens
    leave them plain, because slots encode them later."""
    codecs = layer.codecs
    return (k, v) if codecs.key.block > 1 else codecs.decode(codecs.encode(k, v), k.dtype)
