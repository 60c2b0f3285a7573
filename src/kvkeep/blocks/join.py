"""Join what was computed for texts that did not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvkeep.attention import Rotation
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.host import Host, ModelCache, host_of
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import Ledger
from kvkeep.planes import POSITION
from kvkeep.rotary import Rotary
from kvkeep.store.layer_slices import require_whole


def join(model: Any, caches: Sequence[ModelCache]) -> ModelCache:
    """A cache that holds what several caches hold, one text behind the other.

    Each text was fed by itself, from position 0, so its tokens saw no other text: the result is
    that of a forward of all of them under a block-diagonal mask, with the positions they now have;
    what is fed from then on sees everything. It is not what reading the texts together would give.

    Keys stay as they are and are shared: attention rotates its few queries back instead, by as much
    as a text was moved. Where a policy must evict, or a snapshot is taken, keys are rotated for
    good (and encoded again). The first text only should begin with a BOS token.

    Args:
        caches: of one row each, and of this model, with the same specs; they are frozen, and may
            go on by themselves.

    Raises:
        ShapeError: no caches, or of several rows.
        StateError: caches of another model or other specs.
        UnsupportedError: a cache that evicted something, or a model whose positions cannot be
            moved: they are learned, or its frequencies depend on the length.
    """
    *starts, columns = accumulate((cache.fed for cache in caches), initial=0)
    return join_at(host_of(model), caches, starts, columns)


def join_at(
    host: Host, caches: Sequence[ModelCache], starts: Sequence[int], columns: int
) -> ModelCache:
    """`join`, with gaps.

    Args:
        starts: at which position each text begins, ascending.
        columns: tokens in all. Those that no text holds must be computed before anything else is
            fed, see `kvkeep.blocks.recomputation`.
    """
    _require_alike(caches)
    rotaries = moving(host)
    result = host.new_cache(caches[0].specs)
    texts = [(cache, start) for cache, start in zip(caches, starts, strict=True) if cache.fed]
    for cache, _ in texts:
        cache.freeze()
    for index, layer in enumerate(result.layers if texts else ()):
        parts = [(cache.layers[index], start) for cache, start in texts]
        ledger = Ledger()
        ledger.columns, ledger.geometry = columns, parts[0][0].ledger.geometry
        ledger.apart = len(parts) > 1 or parts[0][1] > 0 or parts[0][0].ledger.apart
        runs = [
            _moved(run, by, rotaries[index]) for part, by in parts for run in part.slots.frozen.runs
        ]
        layer.adopt_frozen(ledger, runs)
    result.routed = texts[0][0].routed if texts else None
    return result


def moving(host: Host) -> list[Rotary]:
    """How each layer rotates its keys; by no frequency where it does not.

    Raises:
        UnsupportedError: what was computed at a position belongs there.
    """
    found = host.rotaries()
    if not any(found):
        raise UnsupportedError(
            f"{host.name} has no rotary embedding, so what it computed for "
            "a text belongs to its place; use a PrefixStore, which keeps places"
        )
    none = Rotary(torch.empty(0))
    return [one or none for one in found]


def windowed(cache: ModelCache) -> str:
    """Which layers of a cache see a window of their own, in words; empty if none does."""
    found = [index for index, layer in enumerate(cache.layers) if layer.window is not None]
    if not found:
        return ""
    ends = [i for i in found if i + 1 not in found]
    starts = [i for i in found if i - 1 not in found]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    several = f"layers {', '.join(runs)}" if len(found) > 1 else f"layer {found[0]}"
    return f"{len(found)} of {len(cache)} layers ({several}) see a window of their own"


def _moved(run: Run, by: int, rotary: Rotary) -> Run:
    """A run that stands so much later; one that was moved before, further."""
    already = 0 if run.rotation is None else run.rotation.offset
    if not by and not already:
        return run
    place = run.joined[POSITION] - already
    rotation = Rotation(by + already, rotary.inv_freq, rotary.interleaved)
    return Run.of({**run.planes, POSITION: place}, rotation)


def _require_alike(caches: Sequence[ModelCache]) -> None:
    if not caches:
        raise ShapeError("no caches to join; give at least one")
    for cache in caches:
        require_whole(cache)
        if cache.rows > 1:
            raise ShapeError(f"a cache of {cache.rows} rows; join texts one by one")
    kinds = {tuple(layer.kind for layer in cache.layers) for cache in caches}
    fed_by = {cache.routed for cache in caches if cache.fed}
    if len(kinds) > 1 or len(fed_by) > 1:
        raise StateError(
            f"caches of {len(kinds)} different specs, fed by attached and other models "
            f"{sorted(map(str, fed_by))}; join those of one model and one spec"
        )
