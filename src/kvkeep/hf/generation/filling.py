"""Fills the cache of a `generate()` call from a store, from blocks or by compression, before the
first forward."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf.cache import Cache
from kvkeep.hf.forward.unserved import supplying
from kvkeep.hf.generation.calls import CALL, Start, counted
from kvkeep.hf.loading.fingerprint import activation_in
from kvkeep.host import Activation, host_of
from kvkeep.host.adapters import names_adapters
from kvkeep.host.compress import read
from kvkeep.host.hooks import foreign_hooks


@supplying(None)  # forwards of stores and blocks bring caches of their own
def filled(start: Start) -> Cache | None:
    """A cache that holds the prompt but its last token, from the store or from blocks; None if they
    would not give the result of a plain `generate`."""
    model, settings, call, ids = start.model, start.settings, start.call, start.plain_ids
    if call is None or ids is None or (settings.store is None and call.blocks is None):
        return None
    place: Any = {"spec": settings.spec, "namespace": settings.namespace, "capacity": start.columns}
    try:
        if call.blocks is not None:
            place |= {"store": settings.store, "recompute": settings.recompute}
            found: Any = call.blocks.prefill(model, **place)[0]
        else:
            assert settings.store is not None
            found = settings.store.prefill(
                model, ids[0], chunk=start.config.prefill_chunk_size, **place
            )
    except UnsupportedError as error:
        _tell_of_hooks(model, error)
        return None
    call.cache = found
    return call.cache


def _tell_of_hooks(model: PreTrainedModel, error: UnsupportedError) -> None:
    """Warn, once, if hooks are the reason why a store is not used; other reasons are documented."""
    if foreign_hooks(model):
        warnings.warn(f"this prompt is computed without the store: {error}", stacklevel=2)


@supplying(None)
def begun_alike(start: Start) -> Cache | None:
    """A cache that holds the tokens with which all rows of the prompt begin, from the store; None
    if it serves no row, or would not give the result of a plain `generate`.

    The cache has the common tokens in the first columns of all rows. So padding columns, which were
    in front of a row's first token, move behind the common tokens, and the mask and the positions
    are changed accordingly.
    """
    settings, call, several = start.settings, start.call, start.several
    mask = start.inputs.get("attention_mask")
    if call is None or call.rows is None or settings.store is None or not start.is_plain:
        return None
    ids = call.rows.cpu()
    columns = torch.arange(ids.shape[1])
    real = torch.ones_like(ids) if mask is None else mask[::several].cpu().long()
    pads = (1 - real).sum(dim=1, keepdim=True)
    if real.shape != ids.shape or not real.equal((columns >= pads).long()):
        return None  # padded on the right, or within
    place = start.inputs.get("position_ids")
    if place is not None and not (place.cpu() == counted(real).repeat_interleave(several, 0)).all():
        return None
    try:
        cache: Any = settings.store.prefill_rows(
            start.model,
            [row[pad:] for row, pad in zip(ids, pads.flatten().tolist(), strict=True)],
            spec=settings.spec,
            namespace=settings.namespace,
            chunk=start.config.prefill_chunk_size,
            capacity=start.columns,
        )
    except ShapeError:
        return None
    except UnsupportedError as error:
        _tell_of_hooks(start.model, error)
        return None
    found: Cache | None = cache
    if found is None or mask is None:
        return found
    if found.why_not(Feature.HOLES):
        return None
    call.moved = found
    for layer in found.layers:
        if layer.cursor.holes_after is not None:
            layer.cursor.holes_after = found.fed  # the moved padding counts as padding in front
    real = ((columns < found.fed) | (columns >= found.fed + pads)).long()
    real = real.repeat_interleave(several, dim=0)
    start.inputs["attention_mask"] = real.to(mask)
    if place is not None:
        start.inputs["position_ids"] = counted(real).to(place)
    return found


@supplying(None)
def compress_prompt(start: Start, cache: Cache) -> None:
    """Read the prompt but its last token, and compress it.

    Raises:
        UnsupportedError: the call's prompt is not one row of token ids without padding.
    """
    ids = start.plain_ids
    if ids is None:
        raise UnsupportedError(
            "kvzip compresses a prompt only if it is one row of token ids without padding; give "
            "such a prompt, or a cache on which compress() was called"
        )
    if ids.shape[1] > 1:
        read(host_of(start.model), cache, ids[:, :-1], start.config.prefill_chunk_size)


def activate_later(model: PreTrainedModel, cache: Cache) -> None:
    """Set the cache's activation if the prompt invokes an activated adapter after the cache's
    tokens."""
    call = CALL.get()
    if cache.activation is not None and call is not None and call.ids is not None:
        found = activation_in(model, call.ids[0].cpu())
        if found is not None and found.start >= cache.fed:
            cache.activation = found


def invoked(start: Start) -> Activation | None:
    """Where an activated adapter starts to compute in the current call's prompt, if it has one row.
    None leaves that to PEFT, which tells only a model that is in a `PeftModel`."""
    ids = None if start.call is None else start.call.ids
    if ids is None or names_adapters(start.model):
        return None
    with suppress(UnsupportedError):  # other adapters are active beside it
        return activation_in(start.model, ids[0].cpu())
    return None
