"""Feeding a model through a cache: a context at once or in chunks, then one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.hf.config import base_config, decoder_config

Tick = Callable[[int], None]
"""Told the cost of every forward, in tokens of a prefill."""

STEP_COST = 16
"""What a forward costs at least, in tokens of a prefill: all weights are read for it."""


def fill(model: Any, cache: Any, ids: Tensor, chunk: int | None, tick: Tick) -> Tensor:
    """Feed ids (B, n), in one call or `chunk` tokens a call -> logits (B, V) after the last."""
    for part in torch.split(ids, chunk or ids.shape[1], dim=1):
        logits: Tensor = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        tick(max(STEP_COST, part.numel()))
    return logits


def follow(model: Any, cache: Any, first: Tensor, ids: Tensor, tick: Tick) -> Iterator[Tensor]:
    """The logits (B, V) that predict each of ids (B, N): `first`, then those after each token of
    ids but the last, fed one at a time as a decoder does."""
    yield first
    for token in torch.split(ids[:, :-1], 1, dim=1):
        yield fill(model, cache, token, None, tick)


def require_positions(model: Any, context: int, more: int = 0) -> None:
    """Raise when there is no context, or a model's positions end before it and `more` tokens do.

    Raises:
        ShapeError: so it is.
    """
    if context < 1:
        raise ShapeError(f"a context of {context} tokens; give at least 1")
    most = getattr(decoder_config(base_config(model)), "max_position_embeddings", None)
    if most is not None and context + more > most:
        after = f" and {more} more" if more else ""
        raise ShapeError(
            f"a context of {context}{after} tokens, but the model holds {most}; use a context of "
            f"at most {most - more}"
        )
