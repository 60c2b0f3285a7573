"""Joins caches of separately computed texts, which are moved to new positions if keys rotate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvkeep.attention import Rotation
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.host import Host, ModelCache, Specs, host_of
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Chunks
from kvkeep.rotary import Rotary
from kvkeep.store.beginning import begin, encodes_alike, exact_specs
from kvkeep.store.layer_slices import require_storable, why_not_whole


def join(
    model: Any,
    caches: Sequence[ModelCache],
    spec: Specs | None = None,
    *,
    capacity: int | None = None,
) -> ModelCache:
    """A cache that holds the texts of several caches, one after the other.

    Each text was fed by itself, from position 0, so its tokens attended to no other text. The
    result equals one forward of all texts at their new positions under a block-diagonal mask;
    tokens fed afterwards attend to all texts. A forward without that mask gives different keys and
    values.

    A text may be longer than the sliding windows of layers, which then hold its last tokens: the
    next tokens see no others.

    Keys are shared and not changed: attention rotates the queries instead, which are few, by each
    text's offset. When a policy evicts, or a snapshot is taken, keys are rotated once, and encoded
    again. Only the first text should begin with a BOS token.

    If a model adds positions to its embeddings (learned or sinusoidal: GPT-2, OPT, BART), keys
    cannot be moved, so each text keeps the positions with which it was computed, from 0 on. The
    result equals one forward of all texts under a block-diagonal mask, with positions that begin at
    0 in each text. The positions of slots, which windows and policies compare, count the tokens of
    all texts, as do the positions of tokens fed afterwards. Source: Parallel Context Windows (arXiv
    2212.10947), where the tokens afterwards follow the longest text.

    Args:
        model: the model that computed the caches.
        caches: caches of one row each, with the same specs. They are frozen, and remain usable.
        spec: spec of the result; None: the caches' spec. For a result with a budget, in `@host`
            storage or with `kivi`, give caches of `keep_all`: the next forward sees all tokens,
            then evicts.
        capacity: see `kvkeep.Cache`.

    Raises:
        ShapeError: no caches, a cache with several rows, or more tokens than a model has positions
            that it adds to its embeddings.
        StateError: the caches differ in specs, or in whether the model was attached; or a cache of
            `spec` cannot begin with these caches' slots.
        UnsupportedError: a cache evicted tokens, or the model's keys cannot be moved: its layers
            use positions in an unknown way, its frequencies change within the number of all tokens
            (`dynamic`, `longrope`), or it has recurrent layers.
    """
    host = host_of(model)
    _require_alike(caches)
    *starts, columns = accumulate((cache.fed for cache in caches), initial=0)
    rotaries = host.rotaries(columns)
    if not any(rotaries):
        _require_positions(host, columns)
    joined = _joined(host, caches, starts, columns, [one or _NONE for one in rotaries])
    if spec is None:
        return joined
    cache = host.new_cache(spec, capacity=capacity)
    exact = exact_specs(cache.specs)
    if not encodes_alike(exact, joined.specs):
        raise StateError(
            f"caches of {joined.specs[0]}, but a cache of {cache.specs[0]} begins with caches of "
            f"{exact[0]}; feed the texts to caches of {exact[0]}"
        )
    begin(cache, joined)
    return cache


def join_at(
    host: Host, caches: Sequence[ModelCache], starts: Sequence[int], columns: int
) -> ModelCache:
    """Join caches whose texts begin at given positions, with gaps between them; see `join`.

    Args:
        starts: the position at which each text begins, ascending.
        columns: total number of tokens. Compute the tokens in the gaps before you feed any other
            tokens; see `kvkeep.blocks.recomputation`.
    """
    _require_alike(caches)
    return _joined(host, caches, starts, columns, moving(host))


def _joined(
    host: Host,
    caches: Sequence[ModelCache],
    starts: Sequence[int],
    columns: int,
    rotaries: Sequence[Rotary],
) -> ModelCache:
    """See `join_at`. `rotaries`: of each layer, without frequencies if keys do not rotate."""
    result = host.new_cache(caches[0].specs)
    texts = [(cache, start) for cache, start in zip(caches, starts, strict=True) if cache.fed]
    for cache, start in texts:
        if start and (reason := cache.why_not_moved(cache.fed, start)):
            raise UnsupportedError(
                f"the model {reason}; feed the texts one after the other, or let each text begin "
                "at a multiple of the block"
            )
    for cache, _ in texts:
        cache.freeze()
    for index, layer in enumerate(result.layers if texts else ()):
        parts = [(cache.layers[index], start) for cache, start in texts]
        history = History()
        history.columns, history.geometry = columns, parts[0][0].history.geometry
        floors = [by + part.history.floor for part, by in parts if part.history.floor]
        history.floor = max(floors, default=0)
        history.joined = len(parts) > 1 or parts[0][1] > 0 or parts[0][0].history.joined
        runs = [
            moved(run, by, rotaries[index]) for part, by in parts for run in part.slots.frozen.runs
        ]
        layer.cursor.adopt_frozen(history, runs)
    result.routed = texts[0][0].routed if texts else None
    return result


def moving(host: Host) -> list[Rotary]:
    """The rotary embedding of each layer, without frequencies if the layer does not rotate.

    Raises:
        UnsupportedError: keys cannot be moved to other positions.
    """
    found = host.rotaries()
    if not any(found):
        raise UnsupportedError(
            f"{host.name} has no rotary embedding, so the keys of a text cannot be moved to other "
            "positions; use kvkeep.blocks.join, which leaves texts at the positions with which "
            "they were computed, or a PrefixStore"
        )
    return [one or _NONE for one in found]


_NONE = Rotary(torch.empty(0))


def _require_positions(host: Host, tokens: int) -> None:
    """Raise ShapeError if a model that adds positions to its embeddings has fewer than `tokens`."""
    most = host.context
    if most is not None and tokens > most:
        raise ShapeError(
            f"texts of {tokens} tokens, but {host.name} has embeddings for {most} positions; join "
            "fewer or shorter texts"
        )


def windowed(cache: ModelCache) -> str:
    """Describe the layers of a cache that have a sliding window; empty if there are none."""
    found = [index for index, layer in enumerate(cache.layers) if layer.window is not None]
    if not found:
        return ""
    ends = [i for i in found if i + 1 not in found]
    starts = [i for i in found if i - 1 not in found]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    several = f"layers {', '.join(runs)}" if len(found) > 1 else f"layer {found[0]}"
    return f"{len(found)} of {len(cache.layers)} layers ({several}) have a sliding window"


def moved(run: Run, by: int, rotary: Rotary) -> Run:
    """A run, moved by `by` positions from where it is now."""
    already = 0 if run.rotation is None else run.rotation.offset
    if not by and not already:
        return run
    position = run.joined[POSITION] - already
    turned = rotary.inv_freq, rotary.interleaved, rotary.first, rotary.beside
    return Run.of({**run.planes, POSITION: position}, Rotation(by + already, *turned))


def _why_not_joinable(layer: LayerCache) -> str:
    """Why a layer lacks slots that the tokens after a joined text see; empty if it does not. A move
    changes where chunks of chunked attention begin."""
    return why_not_whole(layer, of_window=not isinstance(layer.window, Chunks))


def _require_alike(caches: Sequence[ModelCache]) -> None:
    if not caches:
        raise ShapeError("no caches to join; give at least one")
    for cache in caches:
        scoring = next(
            (x.policy for x in cache.layers if x.policy.planes or x.policy.per_head), None
        )
        if scoring is not None:
            raise UnsupportedError(
                f"policy {scoring.name} scores the tokens of one text; join caches of keep_all, "
                "and give join() the spec of the result"
            )
        centred = next(
            (x.key_codec for x in cache.layers if x.key_codec.centre or x.slots.late), None
        )
        if centred is not None:
            raise UnsupportedError(
                f"codec {centred.name} encodes a token depending on other tokens of its text; join "
                "caches of keep_all, and give join() the spec of the result"
            )
        if reason := cache.why_not(Feature.JOINED):
            raise UnsupportedError(f"the model {reason}; feed the texts one after the other")
        require_storable(cache, _why_not_joinable)
        if cache.rows > 1:
            raise ShapeError(f"a cache of {cache.rows} rows; give caches of one row each")
    kinds = {tuple(layer.kind for layer in cache.layers) for cache in caches}
    fed_by = {cache.routed for cache in caches if cache.fed}
    if len(kinds) > 1:
        raise StateError(f"caches of {len(kinds)} different specs; join caches of one spec")
    if len(fed_by) > 1:
        raise StateError(
            "some caches were fed while the model was attached, some while it was not; feed all "
            "caches with the model attached, or all without"
        )
