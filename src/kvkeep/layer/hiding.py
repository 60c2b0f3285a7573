"""Hiding: empties the slots of tokens that a later attention mask hides."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import HOLE, POSITION


def require_hiding(layer: LayerCache, shown: Tensor) -> Tensor:
    """The columns that `hide` would empty, bool (B, columns).

    Args:
        shown: bool (B, columns), True for tokens that later queries may see.

    Raises:
        ShapeError: the mask shows columns that were padding, or it is unknown which ones were.
        UnsupportedError: the tokens have already influenced which slots the policy keeps, or the
            codec encodes tokens after their step, so some are encoded and others are plain.
    """
    history, policy, codec = layer.cursor.history, layer.policy, layer.key_codec
    kinds = history.columns_as()
    tokens = shown.new_empty(0) if kinds is None else kinds == 0
    shown = shown.to(tokens.device)
    if tokens.shape != shown.shape or bool((shown & ~tokens).any()):
        raise ShapeError(
            f"the attention mask shows {shown.sum(dim=1).tolist()} tokens in the "
            f"{shown.shape[1]} columns before this call, but the cache was fed "
            f"{history.seen.tolist()} tokens there, or tokens in other columns; a mask may hide "
            "columns, but cannot show them again: reset() the cache and feed the whole text"
        )
    gone = tokens & ~shown
    why, remedy = "", "use keep_all or a window"
    if layer.setup.by_token or policy.ragged:
        why = f"policy {policy.name} has already used them to choose slots"
    elif layer.slots.late:
        why = f"codec {codec.name} encodes tokens after their step, and has encoded some of them"
        remedy = "use int8"
    if why and bool(gone.any()):
        raise UnsupportedError(
            f"the attention mask hides {int(gone.sum())} of the columns that were fed as "
            f"tokens, but {why}; {remedy}, or reset() the cache and feed the whole text"
        )
    return gone


def hide(layer: LayerCache, shown: Tensor) -> None:
    """Empty the slots of the columns where `shown`, bool (B, columns), is False.

    Positions of later tokens do not change; evicted slots are not restored. See `require_hiding`.
    """
    gone, cursor = require_hiding(layer, shown), layer.cursor
    if not bool(gone.any()):
        return
    layer.settler.accept()
    kinds = cursor.history.columns_as()
    assert kinds is not None
    place = (kinds != -1).cumsum(dim=1) - 1
    at = torch.zeros_like(gone).scatter_(1, place.clamp(min=0), gone)
    with cursor.turn, cursor.moved():
        slots = cursor.slots
        slots.thaw()
        position = slots.evictable()[POSITION]
        held = position.flatten(1).to(torch.int64)
        goes = at.to(held.device).gather(1, held.clamp(min=0)) & (held >= 0)
        with torch.inference_mode():
            slots.observed().write(POSITION, position.masked_fill_(goes.view(position.shape), HOLE))
        cursor.history.hide(kinds.masked_fill(gone, HOLE))
