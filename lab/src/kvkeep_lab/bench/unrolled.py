"""Gradients through a cache by plain autograd, the reference for `kvkeep.train.backward`."""

from __future__ import annotations

from types import SimpleNamespace
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
    """Accumulate the gradients of the mean next-token loss, and return that loss.

    The forward is unrolled, layers outermost, into one graph over concatenated and gathered slots.
    For each layer and chunk the graph stores the layer's input and the keys and values it held;
    torch.utils.checkpoint recomputes the rest.

    Args:
        ids: token ids (1, T).
        cache: the spec with which `decisions` were recorded; they are repeated.
        chunk: tokens in a chunk.
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
    """The outputs of a layer for each chunk, with attention by an empty LayerCache."""
    held, found = layer.state(), []
    step: Any = SimpleNamespace(run=layer.run, states={}, shared=None)  # carries slots only
    for columns, given, call in zip(chunks, hidden, calls, strict=True):

        def cell(
            given: Tensor, columns: slice = columns, call: Any = call, held: Any = held
        ) -> Tensor:
            layer.restore(held)  # differentiable copies
            return decoder.layer(index, columns, given, call, step)

        found.append(_checkpointed(cell, given))
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
        total = total + _checkpointed(share, hidden[:, columns], columns)
    return total / count


def _checkpointed(function: Any, *args: Any) -> Tensor:
    """Call a function and let the graph store only its inputs."""
    # early_stop would leave the function by an exception, on which a layer undoes its step.
    found: Tensor = checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
    )
    return found
