"""A picture of a cache: which tokens each layer and head keeps, and how, as plain data.

A picture is a dict of JSON values:

| key | |
|---|---|
| `tokens` | tokens fed to the row, T |
| `prompt` | how many of them are the prompt; the others are the answer |
| `found` | tokens of the prompt that were found in a store, not computed |
| `group` | positions per column: 1, or more for a long text |
| `texts` | the text of each column's tokens, C in all; long ones are cut |
| `layers` | the layers that attend, in the model's order: see below |
| `live_bytes` | bytes of the slots in use, of all layers and rows |
| `full_bytes` | what a plain `keep_all` cache would hold: all tokens fed, or a layer's own window |

and each of `layers` has

| key | |
|---|---|
| `place` | its place among all layers of the model |
| `spec` | its cache spec |
| `heads` | how many kv heads it has |
| `kept` | how many tokens are kept: an entry for each head, or one if all keep the same |
| `cells` | a text for each entry of `kept`, with a character for each column |

The character at index `i` of `ALPHABET` says: `i // 4`, from 0 to 15, is the share of the column's
tokens that are kept (0: none, 15: all); if `i & 1`, most of these are shared with a store or with
other caches; if `i & 2`, most of them are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.codec import Plain
from kvkeep.host import ModelCache
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.slots import Span
from kvkeep.layer.stats import promised_bytes
from kvkeep.policy import KeepAll

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
"""The characters of cells, by their index."""

KEPT, SHARED, ENCODED = 1, 2, 4
"""The bits of what `states` returns."""

MOST_COLUMNS = 1024
_MOST_CELLS = 2**17
_LEAST_COLUMNS = 64
_FULL = 15  # the largest share
_LONGEST_TEXT = 40  # characters of a column's text


class Held(NamedTuple):
    """What a layer holds of a row: its place in the model, its spec, its slots' positions, int32
    (H, S) on the CPU, with -1 for an empty slot, and how these slots are held."""

    place: int
    spec: str
    positions: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layer: LayerCache, row: int, place: int, spec: str) -> Held:
        """What a layer holds of a row; copied, so it stays as it is."""
        positions = layer.positions()[row : row + 1].squeeze(0)
        return cls(place, spec, positions.to("cpu", torch.int32, copy=True), layer.slots.spans())


class Taken(NamedTuple):
    """What a cache holds of a row, and how many tokens were fed to it. See the module for the
    bytes."""

    tokens: int
    layers: tuple[Held, ...]
    live_bytes: int
    full_bytes: int


@torch.inference_mode()
def taken(cache: ModelCache, row: int = 0) -> Taken:
    """What a cache holds of a row now. This is fast; `picture` may follow in another thread.

    Raises:
        StateError: the cache is in use elsewhere.
    """
    seen: list[int] = cache.seen.tolist()
    layers = zip(cache.layers, cache.places, cache.specs, strict=True)
    return Taken(
        seen[row] if seen else 0,
        tuple(Held.of(layer, row, place, str(spec)) for layer, place, spec in layers),
        sum(layer.live_bytes for layer in cache.layers),
        sum(_full_bytes(layer, tokens) for layer in cache.layers for tokens in seen),
    )


def _full_bytes(layer: LayerCache, tokens: int) -> int:
    """What a layer would hold of a row of `tokens` if it kept all that its queries can see."""
    geometry = layer.history.geometry
    if geometry is None:
        return 0
    policy = KeepAll() if layer.window is None else KeepAll().within(layer.window)
    return promised_bytes(policy, Plain(), Plain(), tokens, geometry._replace(rows=1))


def states(held: Held, tokens: int) -> Tensor:
    """How each of a row's tokens is held, uint8 (H, tokens): 0 if it was evicted, otherwise the sum
    of `KEPT`, `SHARED` if a store or other caches may hold it too, and `ENCODED`."""
    flags = [KEPT + SHARED * span.shared + ENCODED * span.encoded for span in held.spans]
    counts = torch.tensor([span.tokens for span in held.spans], dtype=torch.int64)
    of_slots = torch.tensor(flags, dtype=torch.uint8).repeat_interleave(counts)
    found = torch.zeros(len(held.positions), tokens + 1, dtype=torch.uint8)
    # Empty slots all write to one more place, which is cut off.
    place = held.positions.long().remainder(tokens + 1)
    found.scatter_(1, place, of_slots.expand_as(place))
    return found[:, :tokens]


def columns_of(tokens: int, heads: int, most: int = MOST_COLUMNS) -> int:
    """How many positions a column of a picture has, of a cache with `heads` heads in all layers."""
    most = max(min(most, _MOST_CELLS // max(1, heads)), _LEAST_COLUMNS)
    return max(1, -(-tokens // most))


def picture(
    taken: Taken,
    texts: Sequence[str] = (),
    *,
    prompt: int | None = None,
    found: int = 0,
    columns: int = MOST_COLUMNS,
    group: int | None = None,
) -> dict[str, Any]:
    """The picture of what a cache holds of a row; see the module for its form.

    Args:
        texts: those of the row's tokens, at least `taken.tokens`; empty if they are not known.
        prompt: how many of the tokens are the prompt; None: all.
        found: how many of these were found in a store.
        columns: most columns, unless all layers together have so many heads that fewer are taken.
        group: positions per column, whatever `columns` is; None: as few as that permits.
    """
    tokens = taken.tokens
    heads = sum(len(held.positions) for held in taken.layers)
    group = group or columns_of(tokens, heads, columns)
    return {
        "tokens": tokens,
        "prompt": tokens if prompt is None else min(prompt, tokens),
        "found": found,
        "group": group,
        "texts": [_cut("".join(texts[first : first + group])) for first in range(0, tokens, group)],
        "layers": [_layer(held, tokens, group) for held in taken.layers],
        "live_bytes": taken.live_bytes,
        "full_bytes": taken.full_bytes,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _layer(held: Held, tokens: int, group: int) -> dict[str, Any]:
    found = states(held, tokens)
    heads = len(found)
    if heads > 1 and bool((found == found[:1]).all()):
        found = found[:1]
    return {
        "place": held.place,
        "spec": held.spec,
        "heads": heads,
        "kept": (found > 0).sum(dim=1).tolist(),
        "cells": _cells(found, group),
    }


def _cells(found: Tensor, group: int) -> list[str]:
    """The cells of each head, from its tokens' states, uint8 (H, T)."""
    heads, tokens = found.shape
    columns = -(-tokens // group)
    padded = found.new_zeros(heads, columns * group)
    padded[:, :tokens] = found
    padded = padded.view(heads, columns, group)
    sizes = torch.full((columns,), group)
    if columns:
        sizes[-1] = tokens - (columns - 1) * group
    kept = (padded > 0).sum(dim=2)
    # Only 0 means none, and only the largest share means all.
    share = (kept * _FULL / sizes).round().long().clamp(1, _FULL - 1)
    share = share.masked_fill(kept == 0, 0).masked_fill(kept == sizes, _FULL)
    code = share * 4
    for bit, flag in enumerate((SHARED, ENCODED)):
        most = (padded & flag > 0).sum(dim=2) * 2 > kept
        code += most.long() << bit
    return ["".join([ALPHABET[one] for one in row]) for row in code.tolist()]
