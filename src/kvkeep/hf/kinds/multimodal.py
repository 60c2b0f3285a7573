"""Multimodal models: inputs other than token ids, and the models' own positions.

Such a model replaces some tokens by features of images or sound, and gives embeddings to its
decoder. So token ids do not identify the input, which a cache's history records
(`History.embedded`). Some of these models have rotary positions of three parts, which tokens of an
image share. After an image, positions are then lower than the number of tokens; the model keeps the
difference in an attribute `rope_deltas`, but only for the last prompt that it read, whatever its
cache. So each cache keeps its own difference (`History.offset`), and gives it to the model before
each forward.

Attention does not need this: which slots a query sees depends on the order of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvkeep.cache import note_tokens
from kvkeep.context import within
from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache_argument import NAMES, cache_in
from kvkeep.hf.config import decoder_config, decoder_of
from kvkeep.hf.inputs import arguments_of
from kvkeep.policy import Need

TEXT = frozenset(
    (
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache_position",
        "token_type_ids",
        "mm_token_type_ids",
        *NAMES,
        "labels",
        "logits_to_keep",
    )
)
"""The arguments of a forward that contain only text."""

_DELTAS = "rope_deltas"


@dataclass
class _Told:
    """Whether a forward has inputs other than text, and whether it has reached its decoder."""

    media: bool
    reached: bool = False


_TOLD: ContextVar[_Told | None] = ContextVar("told", default=None)
"""The record of the current forward; None: there is none."""

_counting: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()
"""The modules with `rope_deltas`, by model."""

_from_zero: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""The results of `_counts_from_zero`, by model."""


def brings_tensors(given: Mapping[str, Any], *, beside: Collection[str] = TEXT) -> bool:
    """Whether a call has tensors, or containers of tensors, whose names are not in `beside`:
    images, sound, their features, which transformers may have computed already, or embeddings."""
    leaves = tree_leaves([x for name, x in given.items() if name not in beside])
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def wraps(model: PreTrainedModel) -> bool:
    """Whether a model contains a decoder with its own config, and may give it more than text."""
    return decoder_config(model.config) is not model.config


def watch(model: PreTrainedModel) -> tuple[RemovableHandle, ...]:
    """Hooks by which the forwards of a model that contains a decoder record their inputs; none for
    a plain decoder, whose own hook sees all inputs."""
    if not wraps(model):
        return ()
    return (
        model.register_forward_pre_hook(_begin, with_kwargs=True),
        model.register_forward_hook(_end, always_call=True),
    )


def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    given = arguments_of(model, args, kwargs)
    _TOLD.set(_Told(brings_tensors(given)))
    resume(model, cache_in(given))


def _end(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _TOLD.set(None)


def reach_decoder() -> None:
    """Called before each forward of an attached decoder. A model's forward reaches its decoder only
    once, so a record that was used already is dropped: `_end` does not run after an interrupt from
    the keyboard."""
    told = _TOLD.get()
    if told is not None and told.reached:
        _TOLD.set(None)
    elif told is not None:
        told.reached = True


def media_told() -> bool | None:
    """Whether the current forward has inputs other than text; None: unknown."""
    told = _TOLD.get()
    return None if told is None else told.media


def telling(media: bool | None) -> AbstractContextManager[None]:
    """Tell of the forward inside whether it is given more than token ids; None: tell nothing."""
    return within(_TOLD, None if media is None else _Told(media))


def shares_positions(model: nn.Module) -> bool:
    """Whether tokens of an image may share positions."""
    return bool(_counting_parts(model))


def _counting_parts(model: nn.Module) -> WeakSet[nn.Module]:
    """The modules of a model with `rope_deltas`."""
    found = _counting.get(model)
    if found is None:
        found = WeakSet(x for x in model.modules() if _DELTAS in x.__dict__)
        _counting[model] = found
    return found


def resume(model: nn.Module, cache: Any) -> None:
    """Set a model's `rope_deltas` from a kvkeep cache."""
    if not hasattr(cache, "offset"):
        return
    for part in _counting_parts(model):
        part.__dict__[_DELTAS] = None if cache.offset is None else cache.offset[:, None]


def require_placed(cache: Any, given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError, before a forward of a decoder with these arguments, if a policy needs
    the positions for which keys are rotated, but these differ from the slots' positions."""
    policies = [layer.policy for layer in cache.layers if Need.ROTARY in layer.policy.needs]
    position = given.get("position_ids")
    if not policies or not isinstance(position, Tensor):
        return
    own = _slot_positions(given, position, cache)
    if bool(((_rotary(position) != own) & (own >= 0)).any()):
        raise UnsupportedError(
            f"policy {policies[0].name} undoes the rotation of keys by their positions, but the "
            "rotary positions of these tokens are not 0, 1, 2, ...: they follow an image, or the "
            "call sets position_ids; use snapkv or h2o instead"
        )


def note_fed(cache: Any, given: Mapping[str, Any]) -> None:
    """Record in a cache, after a forward of its decoder with these arguments, whether token ids
    identify the input, and the offset of positions."""
    media = media_told()
    if media is None:
        media = given.get("input_ids") is None
    position = given.get("position_ids")
    if isinstance(position, Tensor) and position.dim() == 3 and position.shape[-1] > 1:
        offset, floor = _shared_positions(cache, given, position)
        media = media or floor > 0
    else:  # positions count up, so the offset stays
        offset, floor = cache.offset, 0
    if media:
        for layer in cache.layers:
            layer.cursor.history.mark_embedded(offset, floor)
    ids = given.get("input_ids")
    if ids is not None and ids.shape[1] > 1 and position is None:
        note_tokens(cache, ids, cache.fed - ids.shape[1])


def _shared_positions(
    cache: Any, given: Mapping[str, Any], position: Tensor
) -> tuple[Tensor | None, int]:
    """For a chunk that was just fed: the next position minus the tokens seen, (B,), None if 0; and
    the number of columns after which all positions count up."""
    n, rotary = position.shape[-1], _rotary(position)
    own = _slot_positions(given, position, cache, fed=True)
    seen = cache.seen.to(position.device)
    highest = rotary.amax(dim=(0, 2))
    if cache.offset is not None:
        before = seen - (own >= 0).sum(dim=1)
        highest = torch.maximum(highest, before + cache.offset.to(position.device) - 1)
    offset = (highest + 1 - seen).to(torch.int64)
    apart = ((rotary != own + offset[:, None]) & (own >= 0)).any(dim=0).any(dim=0).nonzero()
    floor = cache.fed - n + int(apart[-1]) + 1 if len(apart) else 0
    return (offset if bool(offset.any()) else None), floor


def _rotary(position: Tensor) -> Tensor:
    """The positions in a decoder's `position_ids` that rotate queries and keys, (parts, B, n). If
    there are four parts, the first counts tokens and does not rotate."""
    return position[-3:] if position.dim() == 3 else position[None]


def _slot_positions(
    given: Mapping[str, Any], position: Tensor, cache: Any, *, fed: bool = False
) -> Tensor:
    """The positions of a chunk's slots, int64 (1|B, n), -1 for padding.

    Args:
        fed: whether the chunk was fed already.
    """
    n, rows, device = position.shape[-1], position.shape[-2], position.device
    mask = given.get("attention_mask")
    mask = next(iter(mask.values())) if isinstance(mask, Mapping) else mask
    if isinstance(mask, Tensor) and mask.dim() == 4:  # positions, see `kvkeep.hf.forward.masks`
        return mask[:, 0, 0].to(device, torch.int64)
    real = torch.ones(rows, n, dtype=torch.bool, device=device)
    if isinstance(mask, Tensor):
        real = mask[:, -n:].to(device, torch.bool)
    seen = cache.seen.to(device)[:, None] if cache.rows else 0
    before = seen - real.sum(dim=1, keepdim=True) if fed else seen
    return (before + real.cumsum(dim=1) - 1).masked_fill(~real, -1)


def why_not_counted(model: PreTrainedModel, cache: Any = None) -> str:
    """Why a token's rotary position is not the number of tokens before it, in a model or after a
    cache's tokens; empty if it is."""
    if getattr(cache, "offset", None) is not None:
        return "tokens of an image in its cache share positions"
    if wraps(model) and not _counts_from_zero(model):
        return "it counts positions in another way than 0, 1, 2, ..."
    return ""


def require_counted(model: PreTrainedModel, cache: Any, what: str) -> None:
    """Raise UnsupportedError if there is a reason by `why_not_counted`; `what` needs that there is
    none."""
    if reason := why_not_counted(model, cache):
        raise UnsupportedError(
            f"{type(model).__name__} cannot have {what}: {reason}; feed the tokens by the model's "
            "own forward, in order"
        )


class _Reached(Exception):  # noqa: N818 - this is not an error
    """Raised when a forward reaches its decoder."""


def _counts_from_zero(model: PreTrainedModel) -> bool:
    """Whether a model gives the positions 0, 1, 2, ... for a text to its decoder, or no positions.
    Found by a forward that is stopped at the decoder; False for a model that requires more than
    text."""
    known = _from_zero.get(model)
    if known is None:
        found: list[Tensor | None] = []
        thread = get_ident()

        def look(_: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
            if get_ident() != thread or kwargs is None:  # see `TransformersHost.narrowed`
                return
            found.append(kwargs.get("position_ids"))
            raise _Reached

        hook = decoder_of(model).register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        with hook, torch.no_grad(), suppress(Exception):
            type(model).forward(model, input_ids=ids, use_cache=False)
        position = found[0] if found else torch.full((1, 2), -1)
        plain = position is None or bool((_rotary(position).cpu() == torch.arange(2)).all())
        known = _from_zero[model] = plain
    return known
