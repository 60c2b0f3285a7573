"""The mask function of attached models, which returns the new tokens' positions instead of a mask.

The positions have a mask's four axes, so that transformers passes them on unchanged, even where it
creates masks before the forward, as it does for caches that it may compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.hf.handover import MaskedLayer, MaskLength

_AT_ONCE = 1 << 22
"""Most elements of a mask that are checked at once."""


class MaskRequest(NamedTuple):
    """The tag of a tensor of positions: the window of the requested mask (None: causal)."""

    window: int | None
    position: Tensor | None = None  # in the shape that a layer's step takes; None while tracing


def as_mask(position: Tensor, window: int | None) -> Tensor:
    """Positions, int32 (n,) or (B, n), with the axes of a mask and the tag of a request."""
    found: Any = position.view(-1, 1, 1, position.shape[-1])
    found.kvkeep = MaskRequest(window, position)
    return cast(Tensor, found)


def mask_over(original: str) -> Callable[..., Tensor | None]:
    """A mask function for models whose attention was `original` before they were attached.

    With a kvkeep cache it returns the positions of the chunk's tokens, int32 (1, 1, 1, n) if all
    rows have the same, otherwise (B, 1, 1, n) with -1 for padding; together with the slots'
    positions they replace a mask. With any other cache, or none, it calls the original's mask
    function.
    """

    def mask(
        *,
        q_length: int,
        kv_length: int,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        **request: Any,
    ) -> Tensor | None:
        if not isinstance(kv_length, MaskLength):
            passed_on: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[original](
                q_length=q_length,
                kv_length=kv_length,
                attention_mask=attention_mask,
                local_size=local_size,
                allow_is_causal_skip=allow_is_causal_skip,
                use_vmap=use_vmap,
                device=device,
                **request,
            )
            return passed_on
        if not kv_length.routed:
            raise UnsupportedError(
                "the cache was built for another model; build it as kvkeep.Cache(model)"
            )
        layer = kv_length.layer
        # transformers does not skip the mask of a single token for a cache that it may compile.
        plain = allow_is_causal_skip or (kv_length.compileable and q_length == 1)
        if use_vmap or not plain:
            local_size = layer.window if local_size is None else local_size
            asked = request | {"use_vmap": use_vmap, "device": device}
            if torch.compiler.is_compiling() or not _is_causal(
                q_length, int(kv_length), local_size, asked
            ):
                raise UnsupportedError(
                    "the model asks for a mask that is not causal, sliding or padding (image "
                    "blocks, packed sequences, ...); use the cache with kvkeep.detach(model)"
                )
        if torch.compiler.is_compiling():
            real = None if attention_mask is None else attention_mask[:, -q_length:].bool()
            assert kv_length.traced is not None
            place = torch.device(device)
            found: Any = kv_length.traced.next_positions(q_length, real, place)[:, None, None]
            found.kvkeep = MaskRequest(local_size)
        else:
            position = _positions(layer, q_length, attention_mask, torch.device(device))
            if kv_length.note is not None:
                kv_length.note(position)
            found = as_mask(position, local_size)
        return cast(Tensor, found)

    return mask


def _is_causal(n: int, columns: int, window: int | None, request: dict[str, Any]) -> bool:
    """Whether a mask function equals causal attention within a window for the n new tokens, as one
    for image blocks does in texts without images. It is compared for a block of queries at a
    time."""
    causal = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    rows, start, first_column = request["batch_size"], request["q_offset"], request["kv_offset"]
    some = max(1, _AT_ONCE // (rows * columns))

    def shown(first: int, function: Callable[..., Any], use_vmap: bool) -> Tensor:
        mask = sdpa_mask(
            rows,
            min(some, n - first),
            columns,
            start + first,
            first_column,
            function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=request["device"],
        )
        return cast(Tensor, mask)

    return all(
        shown(first, request["mask_function"], request["use_vmap"]).equal(
            shown(first, causal, False)
        )
        for first in range(0, n, some)
    )


def _positions(
    layer: MaskedLayer, n: int, attention_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Positions of the next n tokens, continuing each row."""
    if attention_mask is None:
        return layer.next_positions(n, device)
    if attention_mask.shape[-1] not in (n, layer.fed + n):
        raise ShapeError(
            f"attention mask {tuple(attention_mask.shape)} for {n} new tokens after {layer.fed}; "
            f"give {layer.fed + n} columns"
        )
    if layer.fed and attention_mask.shape[-1] != n:
        before = attention_mask[:, :-n].bool()
        shown = before.sum(dim=1).cpu()
        if not (shown.equal(layer.seen) and _was_fed(layer, before)):
            raise ShapeError(
                f"the attention mask shows {shown.tolist()} tokens in the {layer.fed} columns "
                "before this call, which differ in number or place from the "
                f"{layer.seen.tolist()} that the cache was fed; the mask of fed columns cannot "
                "change: reset() the cache and feed the whole text"
            )
    real = attention_mask[:, -n:].to(device=device, dtype=torch.bool)
    return layer.next_positions(n, device, None if real.all() else real)


def _was_fed(layer: MaskedLayer, real: Tensor) -> bool:
    """Whether the columns fed so far were padding exactly where `real`, bool (B, fed), is False.
    After an eviction, padding is known only for the columns that were recorded before it; without a
    record the result is True."""
    shown = layer.history.shown
    if shown is not None:
        return bool(shown.equal(real[:, : shown.shape[1]].to(shown.device)))
    if not layer.padded or layer.history.floor:
        return True
    position = layer.positions()[:, 0]
    return bool((position >= 0).equal(real.to(position.device)))
