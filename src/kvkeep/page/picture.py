"""A picture of a cache: which tokens each layer and head keeps, and how, as plain data.

A picture is a dict of JSON values:

| key | |
|---|---|
| `tokens` | tokens fed to the row, T |
| `prompt` | number of prompt tokens; the remaining tokens are the answer |
| `found` | tokens of the prompt that were found in a store, not computed |
| `group` | positions per column: 1, or more for a long text |
| `texts` | the text of each column's tokens, C texts in total; long texts are cut |
| `layers` | the attention layers, in the model's order: see below |
| `live_bytes` | bytes of the slots in use, of all layers and rows |
| `full_bytes` | bytes of a plain `keep_all` cache: of all tokens fed, or of a layer's window |

and each of `layers` has

| key | |
|---|---|
| `place` | the layer's index among all layers of the model |
| `spec` | the layer's cache spec |
| `heads` | number of kv heads |
| `kept` | number of tokens kept: an entry for each head, or one entry if all heads keep the same |
| `cells` | a text for each entry of `kept`, with a character for each column |

The character at index `i` of `ALPHABET` means: `i // 4`, from 0 to 15, is the share of the column's
tokens that are kept (0: none, 15: all); if `i & 1`, most kept tokens are shared with a store or
with other caches; if `i & 2`, most kept tokens are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.codec import Plain
from kvkeep.host import ModelCache
from kvkeep.layer.block_encoded import BlockEncoded
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.parted import Parted
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.stats import promised_bytes
from kvkeep.policy import KeepAll

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
"""The characters of cells."""
_LETTERS = torch.tensor(list(ALPHABET.encode()), dtype=torch.uint8)

KEPT, SHARED, ENCODED = 1, 2, 4
"""The bits of a token's state; see `states`."""

MOST_COLUMNS = 1024
_MOST_CELLS = 2**17
_LEAST_COLUMNS = 64
_FULL = 15  # the largest share
_LONGEST_TEXT = 40  # characters of a column's text


class Span(NamedTuple):
    """Adjacent slots in the same state.

    `tokens`: number of tokens for which the slots have room; `shared`: the slots are frozen, so a
    store or other caches may hold them too; `encoded`: keys or values are encoded.
    """

    tokens: int
    shared: bool
    encoded: bool


@singledispatch
def spans_of(slots: LayerSlots) -> tuple[Span, ...]:
    """The slots of `positions()`, in order, as spans."""
    return tuple(
        Span(segment.slots, index < len(slots.frozen.runs), not segment.plain)
        for index, segment in enumerate(slots.segments())
    )


@spans_of.register
def _(slots: Parted) -> tuple[Span, ...]:
    """One span of all slots: `positions()` pads the parts to one length."""
    encoded = not all(segment.plain for segment in slots.segments())
    return (Span(slots.length, False, encoded),) if slots.length else ()


@spans_of.register
def _(slots: BlockEncoded) -> tuple[Span, ...]:
    return spans_of(slots.blocks) + spans_of(slots.tail)


class Held(NamedTuple):
    """A layer's contents for one row: the layer's index in the model, its spec, its slots'
    positions, int32 (H, S) on the CPU, or (1, S) if all heads have the same, with -1 for an empty
    slot; spans of slots that are shared or encoded; and the number of kv heads."""

    place: int
    spec: str
    positions: Tensor
    spans: tuple[Span, ...]
    heads: int

    @classmethod
    def of(cls, layer: LayerCache, row: int, place: int, spec: str) -> Held:
        """A layer's contents for one row, as a copy that does not change."""
        positions = layer.slots.positions()[row : row + 1].squeeze(0)
        positions = positions.to("cpu", torch.int32, copy=True).clamp_(min=-1)
        geometry = layer.history.geometry
        return cls(place, spec, positions, spans_of(layer.slots), geometry.heads if geometry else 0)


class Taken(NamedTuple):
    """A cache's contents for one row, and the number of tokens fed. See the module's docstring for
    the bytes."""

    tokens: int
    layers: tuple[Held, ...]
    live_bytes: int
    full_bytes: int


@torch.inference_mode()
def taken(cache: ModelCache) -> Taken:
    """A cache's current contents for its first row. This is fast; `picture` may run in another
    thread.

    Raises:
        StateError: another object is using the cache's layers.
    """
    seen: list[int] = cache.seen.tolist()
    layers = zip(cache.layers, cache.places, cache.specs, strict=True)
    return Taken(
        seen[0] if seen else 0,
        tuple(Held.of(layer, 0, place, str(spec)) for layer, place, spec in layers),
        sum(layer.slots.stats.live_bytes for layer in cache.layers),
        sum(_full_bytes(layer, tokens) for layer in cache.layers for tokens in seen),
    )


def _full_bytes(layer: LayerCache, tokens: int) -> int:
    """Bytes of a plain layer that keeps all tokens its queries can see, for a row of `tokens`."""
    geometry = layer.history.geometry
    if geometry is None:
        return 0
    policy = KeepAll() if layer.window is None else KeepAll().within(layer.window)
    return promised_bytes(policy, Plain(), Plain(), tokens, geometry._replace(rows=1))


def states(held: Held, tokens: int) -> Tensor:
    """The state of each of a row's tokens, uint8 (H, tokens), or (1, tokens) if all heads have the
    same: 0 if the token was evicted, otherwise the sum of `KEPT`, `SHARED` if a store or other
    caches may hold it too, and `ENCODED`."""
    flags = [KEPT + SHARED * span.shared + ENCODED * span.encoded for span in held.spans]
    counts = torch.tensor([span.tokens for span in held.spans], dtype=torch.int64)
    heads = len(held.positions)
    # numpy uses only this thread; torch's threads would compete with the model's.
    of_slots = torch.tensor(flags, dtype=torch.uint8).numpy().repeat(counts.numpy())
    found = torch.empty(heads, tokens + 1, dtype=torch.uint8)
    found.numpy().fill(0)
    # Empty slots, at -1, all write to the last place, which is cut off.
    found.numpy()[torch.arange(heads)[:, None].numpy(), held.positions.numpy()] = of_slots
    return found[:, :tokens]


def columns_of(tokens: int, heads: int, most: int = MOST_COLUMNS) -> int:
    """Positions per column of a picture, for a cache with `heads` kv heads over all layers."""
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
    """The picture of a cache's contents for one row; see the module's docstring for its fields.

    Args:
        texts: the texts of the row's tokens, at least `taken.tokens`; empty if not known.
        prompt: number of prompt tokens; None: all tokens.
        found: number of prompt tokens found in a store.
        columns: maximum number of columns; with many heads over all layers, fewer are used.
        group: positions per column, overriding `columns`; None: as few as `columns` permits.
    """
    tokens = taken.tokens
    heads = sum(held.heads for held in taken.layers)
    group = group or columns_of(tokens, heads, columns)
    return {
        "tokens": tokens,
        "prompt": tokens if prompt is None else min(prompt, tokens),
        "found": found,
        "group": group,
        "texts": [
            cut("".join(texts[first : first + group]), _LONGEST_TEXT)
            for first in range(0, tokens, group)
        ],
        "layers": [_layer(held, tokens, group) for held in taken.layers],
        "live_bytes": taken.live_bytes,
        "full_bytes": taken.full_bytes,
    }


def cut(text: str, most: int) -> str:
    """A text, cut to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _layer(held: Held, tokens: int, group: int) -> dict[str, Any]:
    columns = -(-tokens // group)
    found = states(held, columns * group)
    if all((head == found[0].numpy()).all() for head in found[1:].numpy()):
        found = found[:1]
    sizes = torch.full((columns,), group)
    sizes[-1:] -= columns * group - tokens
    return {
        "place": held.place,
        "spec": held.spec,
        "heads": held.heads,
        "kept": _sums(found, KEPT).tolist(),
        "cells": _cells(found.view(len(found), columns, group), sizes),
    }


def _cells(found: Tensor, sizes: Tensor) -> list[str]:
    """The cells of each head, from the states of each column's tokens, uint8 (H, C, group), and
    the number of tokens in each column, int64 (C,)."""
    kept = _sums(found, KEPT)
    # Only 0 means none, and only the largest share means all.
    share = (kept * _FULL / sizes).round().long().clamp(1, _FULL - 1)
    share = share.masked_fill(kept == 0, 0).masked_fill(kept == sizes, _FULL)
    code = share * 4
    for bit, flag in enumerate((SHARED, ENCODED)):
        most = _sums(found, flag) * 2 > kept * flag
        code += most.long() << bit
    return [row.numpy().tobytes().decode() for row in _LETTERS[code]]


def _sums(found: Tensor, flag: int) -> Tensor:
    """The sums of a flag over the last dimension."""
    return torch.from_numpy((found.numpy() & flag).sum(axis=-1, dtype="int32"))
