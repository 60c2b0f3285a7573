"""Gradients through a cache by plain autograd: what `kvkeep.train.backward` is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvkeep.host import Layerwise, host_of
from kvkeep.layer.layer import LayerCache
from kvkeep.train.replay import Decisions, replaying

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
    with host_of(model).layerwise(ids) as decoder:
        embedded = [decoder.embed(columns) for columns in chunks]
        hidden = [one.hidden for one in embedded]
        for index, layer in enumerate(replaying(model, cache, decisions).layers):
            calls = [one.calls[index] for one in embedded]
            hidden = _through_layer(decoder, index, layer, chunks, hidden, calls)
        total = _loss(decoder, torch.cat(hidden, dim=1))
        total.backward()  # type: ignore[no-untyped-call]
    return total.detach()


def _through_layer(
    decoder: Layerwise,
    index: int,
    layer: LayerCache,
    chunks: list[slice],
    hidden: list[Tensor],
    calls: list[Any],
) -> list[Tensor]:
    """The outputs of a layer by chunk, with attention by an empty LayerCache."""
    held, found = layer.state(), []
    for columns, given, call in zip(chunks, hidden, calls, strict=True):

        def cell(
            given: Tensor, columns: slice = columns, call: Any = call, held: Any = held
        ) -> Tensor:
            layer.restore(held)  # differentiable copies
            return decoder.layer(index, columns, given, call, layer)

        found.append(_again(cell, given))
        held = layer.state()
    layer.reset()
    return found


def _loss(decoder: Layerwise, hidden: Tensor) -> Tensor:
    targets = decoder.input_ids[:, 1:]
    count = targets.shape[1]

    def share(given: Tensor, columns: slice) -> Tensor:
        logits = decoder.logits(columns, given).flatten(0, 1)
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
