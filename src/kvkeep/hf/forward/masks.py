"""The mask function of attached models, which returns the new tokens' positions instead of a mask.

The positions have a mask's four axes, so that transformers passes them on unchanged, even if it
creates masks before the forward, as it does for caches that it may compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.hf.config import own_implementation
from kvkeep.hf.handover import MaskLength, ModelLayer
from kvkeep.planes import Chunks

_AT_ONCE = 1 << 22
"""The most elements of masks that are compared at once."""


class MaskRequest(NamedTuple):
    """The tag of a tensor of positions.

    Args:
        window: the window of the requested mask; None: causal.
        position, until: see `LayerCache.extend`; None while tracing.
    """

    window: int | None
    position: Tensor | None = None
    until: Tensor | None = None


def as_mask(position: Tensor, window: int | None, until: Tensor | None = None) -> Tensor:
    """Positions, int32 (n,) or (B, n), with the axes of a mask and a `MaskRequest` as tag. If
    tokens see later tokens, the third axis has `position`, then `until`."""
    found: Any = position.view(-1, 1, 1, position.shape[-1])
    if until is not None:
        later = until.to(found.dtype).reshape(-1, 1, 1, until.shape[-1])
        rows = max(len(found), len(later))
        found = torch.cat([x.expand(rows, -1, -1, -1) for x in (found, later)], dim=2)
    found.kvkeep = MaskRequest(window, position, until)
    return cast(Tensor, found)


def mask_over(original: str) -> Callable[..., Tensor | None]:
    """A mask function for models whose attention was `original` when they were attached.

    With a kvkeep cache it returns the positions of the chunk's tokens, int32 (1, 1, 1, n) if all
    rows have the same, otherwise (B, 1, 1, n) with -1 for padding; together with the slots'
    positions they replace a mask. With any other cache, or without a cache, it calls the mask
    function of the model's own implementation: `original`, or the implementation that was set
    since.
    """

    def mask(
        *,
        q_length: int,
        kv_length: int,
        allow_is_causal_skip: bool = True,
        **request: Any,
    ) -> Tensor | None:
        if not isinstance(kv_length, MaskLength):
            now = own_implementation(request.get("config"), original)
            passed_on: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[now](
                q_length=q_length,
                kv_length=kv_length,
                allow_is_causal_skip=allow_is_causal_skip,
                **request,
            )
            return passed_on
        if not kv_length.routed:
            raise UnsupportedError(
                "the cache was built for another model; build it as kvkeep.Cache(model)"
            )
        layer, newest = kv_length.layer, None
        asked: dict[str, Any] = {"use_vmap": False, "device": "cpu"} | request
        attention_mask: Tensor | None = request.get("attention_mask")
        local_size: int | None = request.get("local_size")
        device = torch.device(asked["device"])
        # transformers does not skip the mask of a single token for a cache that it may compile,
        # nor a mask to which a model adds another.
        known = request.get("mask_function") is causal_mask_function
        plain = allow_is_causal_skip or known or (kv_length.compileable and q_length == 1)
        if asked["use_vmap"] or not plain:
            local_size = layer.window if local_size is None else local_size
            if torch.compiler.is_compiling():
                raise UnsupportedError(
                    "the model makes its own mask, which a compiled step cannot compare with "
                    "causal attention; call the model uncompiled"
                )
            own = _own_mask(local_size, layer, attention_mask, asked)
            newest = _Asked(q_length, int(kv_length), asked).newest(own)
        if torch.compiler.is_compiling():
            real = None if attention_mask is None else attention_mask[:, -q_length:].bool()
            assert kv_length.traced is not None
            found: Any = kv_length.traced.next_positions(q_length, device, real)[:, None, None]
            found.kvkeep = MaskRequest(local_size)
        else:
            position = _positions(kv_length, q_length, attention_mask, device)
            until = None
            if newest is not None:  # here padding has the position of the token before it
                real = position.expand(len(newest), -1).cummax(dim=1).values
                until = real.gather(1, newest - int(request["q_offset"]))
            found = as_mask(position, local_size, until)
        return cast(Tensor, found)

    return mask


class _Asked(NamedTuple):
    """A request of transformers for the mask of n new tokens."""

    n: int
    columns: int
    request: dict[str, Any]

    @property
    def fed(self) -> int:
        """The column of the first new token."""
        return int(self.request["q_offset"])

    def shown(
        self,
        function: Callable[..., Any],
        queries: range,
        columns: range,
        *,
        use_vmap: bool = False,
    ) -> Tensor:
        """The mask of a mask function, bool (B, queries, columns): True where it shows a column."""
        mask = sdpa_mask(
            self.request["batch_size"],
            len(queries),
            len(columns),
            queries.start,
            columns.start,
            function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=self.request["device"],
        )
        return cast(Tensor, mask)[:, 0]

    def at_once(self, queries: range, columns: range) -> Iterator[range]:
        """The queries in ranges whose masks are small enough to compare at once."""
        some = max(1, _AT_ONCE // max(1, self.request["batch_size"] * len(columns)))
        return (queries[at : at + some] for at in range(0, len(queries), some))

    def newest(self, own: Callable[..., Any]) -> Tensor | None:
        """The last column that each new token sees, int64 (B, n); None: each token's own column.
        The requested mask must show exactly the columns that `own` shows, and later columns up to
        the last one.

        Raises:
            UnsupportedError: it does not; or earlier tokens would have to see the new tokens.
        """
        function, use_vmap = self.request["mask_function"], self.request["use_vmap"]
        new, first = range(self.fed, self.fed + self.n), int(self.request["kv_offset"])
        held = range(first, first + self.columns)
        column = torch.arange(held.start, held.stop, device=self.request["device"])
        found = []
        for some in self.at_once(new, held):
            query = torch.arange(some.start, some.stop, device=column.device)[:, None]
            asked = self.shown(function, some, held, use_vmap=use_vmap)
            last = torch.where(asked, column, -1).amax(dim=2, keepdim=True).maximum(query)
            later = (column > query) & (column <= last)
            if not asked.equal(self.shown(own, some, held) | later):
                raise UnsupportedError(
                    "the model asks for a mask that is not causal, sliding, chunked or padding, "
                    "even if tokens may see later tokens, as within an image (packed sequences, "
                    "...); use the cache with kvkeep.detach(model)"
                )
            found.append(last[:, :, 0])
        before = range(self.fed)
        for some in self.at_once(before, new):
            if self.shown(function, some, new, use_vmap=use_vmap).any():
                raise UnsupportedError(
                    "tokens that see each other, such as the tokens of an image, begin before "
                    f"column {self.fed} and end after it, but the tokens before it were fed "
                    "already and did not see the rest; reset() the cache and feed all of them in "
                    "one chunk"
                )
        newest = torch.cat(found, dim=1)
        own_column = torch.arange(new.start, new.stop, device=newest.device)
        return None if bool((newest == own_column).all()) else newest


def _own_mask(
    window: int | None, layer: ModelLayer, attention_mask: Tensor | None, request: dict[str, Any]
) -> Callable[..., Any]:
    """The mask function of causal attention within `window`, the layer's own window."""
    if window is None:
        return causal_mask_function
    if not isinstance(layer.window, Chunks):
        return sliding_window_causal_mask_function(window)
    rows, device = request["batch_size"], request["device"]
    left = torch.zeros(rows, dtype=torch.int64, device=device)
    if attention_mask is not None:
        left = (attention_mask.cumsum(dim=1) == 0).sum(dim=1).to(device)
    return chunked_causal_mask_function(window, left)


def _positions(
    length: MaskLength, n: int, attention_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Positions of the next n tokens, continuing each row."""
    layer = length.layer
    if attention_mask is None:
        return layer.next_positions(n, device)
    if attention_mask.shape[-1] not in (n, layer.fed + n):
        raise ShapeError(
            f"attention mask {tuple(attention_mask.shape)} for {n} new tokens after {layer.fed}; "
            f"give {layer.fed + n} columns"
        )
    if layer.fed and attention_mask.shape[-1] != n:
        before = attention_mask[:, :-n].bool()
        if not _was_fed(layer, before):
            assert length.hide is not None  # training and packed forwards begin at column 0
            length.hide(before)
    real = attention_mask[:, -n:].to(device=device, dtype=torch.bool)
    return layer.next_positions(n, device, None if real.all() else real)


def _was_fed(layer: ModelLayer, real: Tensor) -> bool:
    """Whether the columns fed so far hold tokens exactly where `real`, bool (B, fed), is True."""
    if not real.sum(dim=1).cpu().equal(layer.seen):
        return False
    kinds = layer.history.kinds
    return kinds is None or (kinds == 0).equal(real[:, : kinds.shape[1]].to(kinds.device))


def masked(mask: Tensor, columns: Tensor, slots: int) -> Tensor:
    """A mask (B, 1, n, S) of a model, bool or added to scores, that shows only the columns which
    an indexer chose, (B, n, c)."""
    hidden = torch.ones(*columns.shape[:2], slots, dtype=torch.bool, device=columns.device)
    hidden = hidden.scatter(2, columns.long(), False)[:, None]
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
