"""Gradients through a cache by plain autograd: what `kvkeep.train.backward` is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvkeep.hf.layerwise import Apart, Call
from kvkeep.hf.replayed import Decisions, replaying

_PIECE = 256
"""Tokens whose logits are computed at once."""


def unrolled(model: Any, ids: Tensor, cache: str, chunk: int, decisions: Decisions) -> Tensor:
    """Add the gradients of the mean loss of the next token, and return that loss.

    The forward is unrolled, layers outermost, into one graph through slots that are concatenated
    and gathered. Of each layer and chunk the graph holds what it got, and what of keys and values
    the layer held; the rest is computed again by torch.utils.checkpoint.

    Args:
        ids: (1, T).
        cache: the spec with which `decisions` were made; they are made again.
        chunk: tokens that were computed at once.
    """
    count = ids.shape[1]
    chunks = [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    with Apart(model, ids, None) as parts:
        before = [parts.before(columns) for columns in chunks]
        hidden = [first for first, _ in before]
        for index, layer in enumerate(replaying(parts.model, cache, decisions).layers):
            hidden = _through_layer(parts, index, layer, hidden, [c[index] for _, c in before])
        total = _loss(parts, torch.cat(hidden, dim=1))
        total.backward()  # type: ignore[no-untyped-call]
    return total.detach()


def _through_layer(
    parts: Apart, index: int, layer: Any, hidden: list[Tensor], calls: list[Call]
) -> list[Tensor]:
    """The outputs of a layer by chunk, with attention by an empty LayerCache."""
    held, found = layer.state(), []
    for given, call in zip(hidden, calls, strict=True):

        def cell(given: Tensor, call: Call = call, held: Any = held) -> Tensor:
            layer.restore(held)  # differentiable copies
            return parts.layer(index, given, call, layer)

        found.append(_again(cell, given))
        held = layer.state()
    layer.reset()
    return found


def _loss(parts: Apart, hidden: Tensor) -> Tensor:
    targets = parts.input_ids[:, 1:]
    count = targets.shape[1]

    def share(given: Tensor, columns: slice) -> Tensor:
        logits = parts.logits(columns, given).flatten(0, 1)
        wanted = targets[:, columns].flatten()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    total = hidden.new_zeros(())
    for start in range(0, count, _PIECE):
        columns = slice(start, min(start + _PIECE, count))
        total = total + _again(share, hidden[:, columns], columns)
    return total / count


def _again(function: Any, *args: Any) -> Tensor:
    """Call a function, of which the graph holds only what goes in."""
    # Left in the midst of it, as early_stop would, a layer undoes its step.
    found: Tensor = checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
    )
    return found
