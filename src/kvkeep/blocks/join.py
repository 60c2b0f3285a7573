"""Join caches of separate texts into one, at new positions, without touching their keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvkeep.attention import Rotation
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.frozen import Run
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import base_config, decoder_config
from kvkeep.hf.rotary import rotary_of
from kvkeep.ledger import Ledger
from kvkeep.planes import POSITION
from kvkeep.rotary import Rotary
from kvkeep.store.stretch import require_kept


def join(model: PreTrainedModel, caches: Sequence[Cache]) -> Cache:
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
    _require_alike(caches)
    rotaries = _rotaries(model)
    result = Cache(model, caches[0].specs)
    texts = [cache for cache in caches if cache.fed]
    for cache in texts:
        cache.freeze()
    for index, layer in enumerate(result.layers):
        runs, start = list[Run](), 0
        for cache in texts:
            runs += [_moved(run, start, rotaries[index]) for run in cache.layers[index].frozen]
            start += cache.fed
        if runs:
            ledger = Ledger()
            ledger.columns, ledger.like = start, texts[0].layers[index].state().ledger.like
            layer.adopt(ledger, frozen=runs)
    result.routed = texts[0].routed if texts else None
    return result


def _moved(run: Run, by: int, rotary: Rotary) -> Run:
    """A run that stands so much later; one that was moved before, further."""
    already = 0 if run.rotation is None else run.rotation.offset
    if not by and not already:
        return run
    place = run.joined[POSITION] - already
    rotation = Rotation(by + already, rotary.inv_freq, rotary.interleaved)
    return Run.of({**run.planes, POSITION: place}, rotation)


def _require_alike(caches: Sequence[Cache]) -> None:
    if not caches:
        raise ShapeError("no caches to join; give at least one")
    for cache in caches:
        require_kept(cache)
        if cache.rows > 1:
            raise ShapeError(f"a cache of {cache.rows} rows; join texts one by one")
    kinds = {tuple(layer.kind for layer in cache.layers) for cache in caches}
    fed_by = {cache.routed for cache in caches if cache.fed}
    if len(kinds) > 1 or len(fed_by) > 1:
        raise StateError(
            f"caches of {len(kinds)} different specs, fed by attached and other models "
            f"{sorted(map(str, fed_by))}; join those of one model and one spec"
        )


def _rotaries(model: PreTrainedModel) -> list[Rotary]:
    """How each layer rotates its keys; by no frequency where it does not."""
    text = decoder_config(base_config(model))
    rotary = rotary_of(text)
    if rotary is None:
        raise UnsupportedError(
            f"{text.model_type} has no rotary embedding, so what it computed for a text belongs to "
            "its place; use a PrefixStore, which keeps places"
        )
    none = Rotary(torch.empty(0))
    uses: Sequence[int] | None = getattr(text, "no_rope_layers", None)  # 1 where it is used
    return [
        rotary if uses is None or uses[index] else none for index in range(text.num_hidden_layers)
    ]
