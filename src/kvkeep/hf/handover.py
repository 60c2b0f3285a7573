"""What a cache gives to the mask function and the attention function of an attached model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvkeep.attention import Attend
from kvkeep.graph.custom_ops import Traced
from kvkeep.layer.history import History
from kvkeep.layer.sight import Sighted
from kvkeep.layer.step import StepInputs


class MaskedLayer(Protocol):
    """What the mask function asks of a layer: a `LayerCache`, or a layer that training runs."""

    @property
    def window(self) -> int | None:
        """The layer's own sliding window, in tokens."""

    @property
    def history(self) -> History:
        """What was fed before this chunk."""

    @property
    def fed(self) -> int:
        """Columns fed before this chunk, padding included."""

    @property
    def seen(self) -> Tensor:
        """Tokens fed before this chunk, int64 (B,), padding not counted."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the next n tokens; see `History.next_positions`."""


class AttendedLayer(Protocol):
    """What the attention function asks of a layer."""

    def sighted(self, queries: Tensor) -> Sighted:
        """See `LayerCache.sighted`."""

    @property
    def window(self) -> int | None:
        """The layer's own sliding window, in tokens."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the next n tokens; see `History.next_positions`."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of one chunk; see `LayerCache.run`."""


@runtime_checkable
class ReadLayer(Protocol):
    """What the attention function asks of a layer whose slots other layers may attend to."""

    @property
    def unread(self) -> int:
        """How many of them have not attended since its last step."""

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """See `SharedSlots.read`."""


class MaskLength(int):
    """The key length of a mask request. It also carries the request's layer to the mask
    function."""

    layer: MaskedLayer
    traced: Traced | None
    routed: bool
    compileable: bool
    hide: Callable[[Tensor], None] | None = None
    """Hides columns that were fed, see `kvkeep.cache.Cache.hide`; None: none can be."""


class Absorbed(Protocol):
    """The projections of a layer whose keys and values are latents."""

    @property
    def key(self) -> Tensor:
        """The keys of its slots, (B, 1, n, Dk)."""

    def queries(self, q: Tensor) -> Tensor:
        """Queries (B, Hq, n, D) of the model as queries of latents, (B, Hq, n, Dk)."""

    def results(self, out: Tensor) -> Tensor:
        """Attention to latents, (B, n, Hq, Dv), as attention to the model's values."""


@dataclass(eq=False)
class Handed:
    """The tag that `update` puts on new keys and values: the layer whose step the attention
    function runs on them, and whether it did (`taken`), since it may do so only once, and then as
    often as layers without keys of their own read it (`ReadLayer`). `versions` are the version
    counters of both tensors, where torch keeps them."""

    layer: AttendedLayer
    traced: Traced | None
    versions: tuple[int, int] | None = None
    taken: bool = False
    weights: bool = False
    """Whether the attention function must return attention weights."""
    absorbed: Absorbed | None = None
    """How the module of a latent layer makes queries for its latents; None: of another layer."""
    plain: bool = False
    """Whether the step is made at once, outside of any graph."""


def hand_over(k: Tensor, v: Tensor, layer: AttendedLayer, traced: Traced | None) -> Handed:
    """Tag new keys and values, (B, H, n, D) each, as those of one step of a layer.

    Args:
        traced: the layer's step as an operation of a graph; None where steps are never compiled.
    """
    handed = Handed(layer, traced)
    if not torch.compiler.is_compiling():
        handed.plain = traced is not None and not traced.on_device
        if not (k.is_inference() or v.is_inference()):
            handed.versions = k._version, v._version
    k.kvkeep = v.kvkeep = handed  # type: ignore[attr-defined]
    return handed
