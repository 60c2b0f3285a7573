"""Packed forwards: one forward computes the next tokens of several sequences, without padding.

A sequence is a cache of one row. All tokens lie side by side in one row of token ids: linear
layers, norms and experts run over all of them, and attention runs in each sequence's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import RollbackError, ShapeError, StateError
from kvkeep.host.cache import ModelCache
from kvkeep.layer.packed import PackedLayer
from kvkeep.layer.packed_states import PackedStates, packed_states


class Piece(NamedTuple):
    """The next tokens of one sequence: int64 (n,), its cache, of one row, and the number of last
    tokens to return logits for."""

    ids: Tensor
    cache: ModelCache
    last: int = 1


class Packed(NamedTuple):
    """The tokens of a packed forward: ids and positions, int64 (1, tokens), the indices of the
    tokens whose logits are returned, int64, the attention layers, the states of the recurrent
    layers, and the number of sequences."""

    ids: Tensor
    positions: Tensor
    last: Tensor
    layers: list[PackedLayer]
    states: PackedStates
    sequences: int


@contextmanager
def packed(pieces: Sequence[Piece], device: torch.device) -> Iterator[Packed]:
    """Begin a forward of every cache, and pack the tokens. If the body raises, the caches return to
    their previous state; a cache that has evicted tokens raises until it is reset.

    Args:
        device: the device for token ids.

    Raises (nothing was fed then):
        ShapeError: there is no piece, or a piece is not a row of token ids with a cache of one row.
        StateError: two pieces have the same cache, or a cache cannot be fed now.
        CapacityError: a cache has no room.
    """
    _check(pieces)
    counts = [len(piece.ids) for piece in pieces]
    caches = [piece.cache for piece in pieces]
    fed = [cache.fed for cache in caches]
    begun: list[tuple[ModelCache, int]] = []
    carried = [cache.carried for cache in caches]
    try:
        with packed_states(carried, fed, counts, device) as states:
            for cache, count, before in zip(caches, counts, fed, strict=True):
                cache.begin(count)
                begun.append((cache, before))
            yield from _attending(pieces, fed, counts, device, states)
    except BaseException:
        for cache, before in begun:
            with suppress(RollbackError, StateError):
                cache.rewind(before)
        raise


def _attending(
    pieces: Sequence[Piece],
    fed: Sequence[int],
    counts: Sequence[int],
    device: torch.device,
    states: PackedStates,
) -> Iterator[Packed]:
    """Pack the tokens and the layers, and check that each layer was fed."""
    caches = [piece.cache for piece in pieces]
    layers = [
        PackedLayer(of_sequences, counts)
        for of_sequences in zip(*(cache.layers for cache in caches), strict=True)
    ]
    positions = [torch.arange(a, a + n) for a, n in zip(fed, counts, strict=True)]
    ends = zip(accumulate(counts), pieces, strict=True)
    last = [index for end, piece in ends for index in range(end - piece.last, end)]
    tokens = Packed(
        torch.cat([piece.ids.to(device) for piece in pieces])[None],
        torch.cat(positions)[None].to(device),
        torch.tensor(last, device=device),
        layers,
        states,
        len(pieces),
    )
    with ExitStack() as prepared:
        for layer in layers:
            prepared.callback(layer.end)
            layer.prepare()
        yield tokens
    for cache, before, count in zip(caches, fed, counts, strict=True):
        short = {layer.fed for layer in cache.layers} - {before + count}
        if short:
            raise StateError(
                f"a packed forward of {count} tokens after {before} left layers at "
                f"{sorted(short)}: the model does not attend once in each layer; feed its "
                "sequences one by one"
            )
        for attended in cache.layers:
            attended.cursor.require_read()


def _check(pieces: Sequence[Piece]) -> None:
    if not pieces:
        raise ShapeError("a packed forward of no sequence; give at least one piece")
    if len({id(piece.cache) for piece in pieces}) < len(pieces):
        raise StateError(
            "two pieces of a packed forward have the same cache; give each sequence its own cache "
            "or a fork"
        )
    for index, (ids, cache, last) in enumerate(pieces):
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
            raise ShapeError(
                f"piece {index} of a packed forward has token ids {tuple(ids.shape)} of "
                f"{ids.dtype}; give at least one id, int64 (n,)"
            )
        if not 1 <= last <= len(ids):
            raise ShapeError(
                f"piece {index} of a packed forward has {len(ids)} tokens, but logits of the last "
                f"{last} are asked for; give 1 to {len(ids)}"
            )
        if cache.rows > 1 or (cache.rows and cache.layers[0].padded):
            raise ShapeError(
                f"piece {index} of a packed forward has a cache of {cache.rows} rows"
                f"{' with padding' if cache.layers[0].padded else ''}; give each sequence a cache "
                "of one row, without padding"
            )
        layers, expected = len(cache.layers), len(pieces[0].cache.layers)
        if layers != expected:
            raise ShapeError(
                f"piece {index} of a packed forward has a cache of {layers} layers, the first "
                f"{expected}; give caches of one model"
            )
