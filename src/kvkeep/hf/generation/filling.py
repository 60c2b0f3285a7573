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
from kvkeep.hf.generation.calls import CALL, Settings, counted, is_plain, plain_call
from kvkeep.hf.loading.fingerprint import activation_in
from kvkeep.host import Activation, host_of
from kvkeep.host.adapters import names_adapters
from kvkeep.host.compress import read
from kvkeep.host.hooks import foreign_hooks


@supplying(None)  # stores and blocks run forwards with their own caches
def filled(
    model: PreTrainedModel,
    settings: Settings,
    model_kwargs: dict[str, Any],
    chunk: int | None,
    capacity: int,
) -> Cache | None:
    """A cache that holds the prompt except its last token, from the store or from blocks; None if
    the result would differ from a plain `generate`."""
    call = plain_call(model, model_kwargs)
    if call is None or call.ids is None or (settings.store is None and call.blocks is None):
        return None
    place: Any = {"spec": settings.spec, "namespace": settings.namespace, "capacity": capacity}
    try:
        if call.blocks is not None:
            place |= {"store": settings.store, "recompute": settings.recompute}
            found: Any = call.blocks.prefill(model, **place)[0]
        else:
            assert settings.store is not None
            found = settings.store.prefill(model, call.ids[0], chunk=chunk, **place)
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
def begun_alike(
    model: PreTrainedModel,
    settings: Settings,
    model_kwargs: dict[str, Any],
    several: int,
    chunk: int | None,
    capacity: int,
) -> Cache | None:
    """A cache that holds the common beginning of all rows of the prompt, from the store; None if
    there is none, or the result would differ from a plain `generate`.

    The cache has the common tokens in the first columns of all rows. So padding columns, which were
    in front of a row's first token, move behind the common tokens, and the mask and the positions
    are changed accordingly.
    """
    call, mask = CALL.get(), model_kwargs.get("attention_mask")
    if call is None or call.rows is None or settings.store is None:
        return None
    if not is_plain(model, call, model_kwargs):
        return None
    ids = call.rows.cpu()
    columns = torch.arange(ids.shape[1])
    real = torch.ones_like(ids) if mask is None else mask[::several].cpu().long()
    pads = (1 - real).sum(dim=1, keepdim=True)
    if real.shape != ids.shape or not real.equal((columns >= pads).long()):
        return None  # rows are not padded on the left only
    place = model_kwargs.get("position_ids")
    if place is not None and not (place.cpu() == counted(real).repeat_interleave(several, 0)).all():
        return None
    try:
        cache: Any = settings.store.prefill_rows(
            model,
            [row[pad:] for row, pad in zip(ids, pads.flatten().tolist(), strict=True)],
            spec=settings.spec,
            namespace=settings.namespace,
            chunk=chunk,
            capacity=capacity,
        )
    except ShapeError:
        return None
    except UnsupportedError as error:
        _tell_of_hooks(model, error)
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
    model_kwargs["attention_mask"] = real.to(mask)
    if place is not None:
        model_kwargs["position_ids"] = counted(real).to(place)
    return found


@supplying(None)
def compress_prompt(
    model: PreTrainedModel, model_kwargs: dict[str, Any], cache: Cache, chunk: int | None
) -> None:
    """Read the prompt except its last token, and compress it.

    Raises:
        UnsupportedError: the call's prompt is not one row of token ids without padding.
    """
    call = plain_call(model, model_kwargs)
    if call is None or call.ids is None:
        raise UnsupportedError(
            "kvzip compresses a prompt only if it is one row of token ids without padding; give "
            "such a prompt, or a cache on which compress() was called"
        )
    if call.ids.shape[1] > 1:
        read(host_of(model), cache, call.ids[:, :-1], chunk)


def activate_later(model: PreTrainedModel, cache: Cache) -> None:
    """Set the cache's activation if the prompt invokes an activated adapter after the cache's
    tokens."""
    call = CALL.get()
    if cache.activation is not None and call is not None and call.ids is not None:
        found = activation_in(model, call.ids[0].cpu())
        if found is not None and found.start >= cache.fed:
            cache.activation = found


def invoked(model: PreTrainedModel) -> Activation | None:
    """The activation of an activated adapter by the current call's prompt, if it has one row; None:
    no activation, or PEFT handles it, which it does only for a model inside a `PeftModel`."""
    call = CALL.get()
    if call is None or call.model is not model or call.ids is None or names_adapters(model):
        return None
    with suppress(UnsupportedError):  # other adapters are active at the same time
        return activation_in(model, call.ids[0].cpu())
    return None
