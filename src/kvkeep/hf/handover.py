"""The tags by which a cache passes its layers to the mask and attention functions of an attached
model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvkeep.attention import Attend
from kvkeep.graph.custom_ops import Traced
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs

BIAS = "bias_by_distance"
"""The argument by which a module's forward tells the attention function of `StepInputs.bias`."""

ModelLayer = LayerCache | AttendingLayer
"""A layer that the mask and attention functions use, or a substitute for it."""


@runtime_checkable
class ReadLayer(Protocol):
    """Further members that the attention function uses if other layers read the layer's slots."""

    @property
    def cursor(self) -> Cursor:
        """Counts the readers that have yet to attend to the slots of the layer's last step."""

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """See `LayerCache.read`."""


class MaskLength(int):
    """The key length of a mask request. It also carries the request's layer to the mask
    function."""

    layer: ModelLayer
    traced: Traced | None
    routed: bool
    compileable: bool
    hide: Callable[[Tensor], None] | None = None
    """Hides columns that were fed, see `kvkeep.cache.hide_columns`; None: the cache cannot hide."""


class Absorbed(Protocol):
    """The projections of a layer whose keys and values are latents."""

    def queries(self, q: Tensor) -> Tensor:
        """Queries (B, Hq, n, D) of the model as queries of latents, (B, Hq, n, Dk)."""

    def results(self, out: Tensor) -> Tensor:
        """Attention to latents, (B, n, Hq, Dv), as attention to the model's values."""


class IndexPart(NamedTuple):
    """The part of an index in a layer's step.

    Args:
        keys: the index's keys of new tokens, (B, 1|H, n, D). Slots hold them behind the keys.
        chosen: the positions that the index has chosen, see `View`; None: the attention function is
            told of them by the argument `indices`, int32 (B, n, c).
        mask: the new tokens' positions, see `as_mask`; None: the attention function is given them.
        weight: the element of queries for the elements of these keys; 0: attention does not read
            them.
    """

    keys: Tensor
    chosen: Tensor | None = None
    mask: Tensor | None = None
    weight: float = 0.0

    def step(self, inputs: StepInputs) -> StepInputs:
        """The inputs of the layer's step, from those of attention alone."""
        q, k = inputs.q, inputs.k
        keys = self.keys.to(k.dtype).expand(-1, k.shape[1], -1, -1)
        # Not `pad`, which would fix the number of tokens of a loaded program.
        weights = q.new_full((*q.shape[:3], keys.shape[-1]), self.weight)
        return inputs._replace(
            q=torch.cat([q, weights], dim=-1),
            k=torch.cat([k, keys], dim=-1),
            chosen=inputs.chosen if self.chosen is None else self.chosen,
        )


@dataclass(eq=False)
class Handed:
    """The tag that `update` puts on new keys and values.

    The attention function runs a step of `layer` on them, once; `taken`: the step was made. Layers
    without keys may then read the layer's slots (`ReadLayer`). `traced`: the step as an operation
    of a graph. `versions`: the version counters of both tensors, if torch keeps them."""

    layer: ModelLayer
    traced: Traced | None
    versions: tuple[int, int] | None = None
    taken: bool = False
    weights: bool = False
    """Whether the attention function must return attention weights."""
    absorbed: Absorbed | None = None
    """The projections of a latent layer's module; None: the layer has no latents."""
    indexed: IndexPart | None = None
    """The part of the layer's index; None: the layer has no index."""
    reads: int = 0
    """Number of readings of the step that were traced."""
    plain: bool = False
    """Whether the step is made outside of any graph."""


def hand_over(k: Tensor, v: Tensor, layer: ModelLayer, traced: Traced | None) -> Handed:
    """Tag new keys and values, (B, H, n, D) each, as the inputs of one step of a layer.

    Args:
        traced: the layer's step as an operation of a graph; None: its steps are never compiled.
    """
    handed = Handed(layer, traced)
    if not torch.compiler.is_compiling():
        handed.plain = traced is not None and not traced.on_device
        if not (k.is_inference() or v.is_inference()):
            handed.versions = k._version, v._version
    k.kvkeep = v.kvkeep = handed  # type: ignore[attr-defined]
    return handed


def handed_on(given: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tag keys and values that were made of tagged ones, as the inputs of the same step; returns
    them."""
    handed: Handed = given[0].kvkeep  # type: ignore[attr-defined]
    (k, v), (new_k, new_v) = given, made
    if handed.versions is not None and handed.versions == (k._version, v._version):
        handed.versions = new_k._version, new_v._version
    new_k.kvkeep = new_v.kvkeep = handed  # type: ignore[attr-defined]
    return made


def taggable(*given: Tensor) -> tuple[Tensor, ...]:
    """Tensors that can be tagged. In traced code these are views, because torch's compiler cannot
    set attributes of a tensor from an operation with several results, such as `chunk`."""
    return tuple(x.view_as(x) for x in given) if torch.compiler.is_compiling() else given
