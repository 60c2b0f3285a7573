"""Attention to tokens that an index of compressed keys chooses for each query: Qwen 4.

The index's key for a block of tokens is the mean of keys of its tokens, rotated for the position of
the block's first token. So slots hold the token's own key, not rotated. The model's own indexer
makes blocks of the tokens that a query sees, oldest first, and chooses blocks. If heads hold
different tokens, it chooses for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache_argument import NAMES, cache_in
from kvkeep.hf.config import decoder_of
from kvkeep.hf.handover import Handed, IndexPart
from kvkeep.hf.kinds.base import Handle, Kind, Replaced
from kvkeep.hf.kinds.recurrent_layers import changed
from kvkeep.hf.kinds.states import KeepsStates
from kvkeep.layer.sight import Sighted
from kvkeep.planes import along_slots

Angles = tuple[Tensor, Tensor]
"""The cosines and sines of tokens' positions, (B, n, R) each."""


class Compressed(Kind):
    """Models whose index compresses the keys of several tokens to one."""

    def has(self, text: PreTrainedConfig) -> bool:
        return getattr(text, "indexer_compress_ratio", None) is not None

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Let indexers choose among the tokens of a kvkeep cache."""
        decoder: Any = decoder_of(model)
        own = decoder.forward
        forward = update_wrapper(partial(_decoded, own), own)  # its signature is read
        changes: list[Handle] = [Replaced(decoder, "forward", forward)]
        for module in [x for x in decoder.modules() if hasattr(x, "indexer")]:
            attend = partial(_attended, module.forward, module, decoder.rotary_emb)
            choose = partial(_chosen, module.indexer.forward)
            changes += [Replaced(module, "forward", attend)]
            changes += [Replaced(module.indexer, "forward", choose)]
        return changes

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Raise UnsupportedError if tokens of an image share positions: slots do not hold the
        positions by which the index would rotate its keys."""
        position = given.get("position_ids")
        parts = position[-3:] if isinstance(position, Tensor) and position.dim() == 3 else None
        if parts is not None and bool((parts != parts[:1]).any()):
            raise UnsupportedError(
                f"{decoder.config.model_type} with images: its index needs positions of their "
                "tokens that a kvkeep cache does not hold; give text only, or call "
                "kvkeep.detach(model)"
            )


class _DecoderCache:
    """A kvkeep cache, as the decoder of such a model uses it: with a place for the positions of the
    index in each layer, which stays empty.

    Args:
        cache: the cache, whose class and members this object has.
        position: the rotary positions of the forward's tokens, (..., 1|B, n).
    """

    def __init__(self, cache: KeepsStates, position: Tensor) -> None:
        self.cache, self.position = cache, position[-1] if position.dim() == 3 else position

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    @property
    def layers(self) -> _Unplaced:
        """The model's layers."""
        return _Unplaced()


class _Unplaced:
    """Layers, or one of them, without positions of an index."""

    indexer_position_ids: Tensor | None = None

    def __getitem__(self, place: int) -> _Unplaced:
        return self


def _decoded(own: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a decoder."""
    cache = cache_in(kwargs)
    if not isinstance(cache, KeepsStates):
        return own(*args, **kwargs)
    seen = _DecoderCache(cache, kwargs["position_ids"])
    given = {name: seen if x is cache else x for name, x in kwargs.items()}
    found = own(*args, **given)
    if isinstance(found, tuple):
        return changed(found, lambda x: cache if x is seen else x)
    for name in NAMES:
        if found.get(name) is seen:
            found[name] = cache
    return found


def _attended(
    own: Any,
    module: Any,
    rotary: Callable[[Tensor, Tensor], Angles],
    hidden_states: Tensor,
    position_embeddings: Angles,
    attention_mask: Any,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """The forward of an attention module. With a kvkeep cache, its mask holds positions, which the
    module cannot change to a mask of the chosen tokens; so it gets a mask without content."""
    if type(cache) is _DecoderCache:
        layer: Any = cache.cache
        layer = layer.layers[layer.model_layers.indices[module.layer_idx]]
        cache = _IndexCache(cache, layer, attention_mask, rotary)
        attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden_states.device)
    return own(hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs)


class _IndexCache:
    """The cache argument of an attention module.

    Args:
        cache: the decoder's cache.
        layer: the layer of the module.
        mask: the new tokens' positions, (1|B, 1, 1|2, n).
        rotary: the model's rotary embedding.
    """

    part: IndexPart

    def __init__(
        self,
        cache: Any,
        layer: Any,
        mask: Tensor,
        rotary: Callable[[Tensor, Tensor], Angles],
    ) -> None:
        self._cache, self._layer, self.mask, self._rotary = cache, layer, mask, rotary

    def update(
        self, keys: Tensor, values: Tensor, place: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        found: tuple[Tensor, Tensor] = self._cache.update(keys, values, place, *args, **kwargs)
        handed: Handed | None = getattr(found[0], "kvkeep", None)
        if handed is not None:
            handed.indexed = self.part
        return found

    def sighted(self) -> Sighted:
        """The tokens among which the index chooses: the earlier tokens in the order of their
        positions, then the new ones."""
        found: Sighted = self._layer.sighted(self.mask[:, 0, 0])
        if found.keys is None:
            return found
        keys = found.keys[:, : found.position.shape[1]]
        past = keys.shape[2]
        order = found.position[..., :past].argsort(dim=2, stable=True)
        new = torch.arange(past, found.position.shape[2], device=order.device)
        every = torch.cat([order, new.expand(*order.shape[:2], -1)], dim=2)
        visible = found.visible.expand(len(every), -1, -1, -1)
        return Sighted(
            keys.expand(len(order), -1, -1, -1).gather(2, along_slots(order, keys)),
            found.position.gather(2, every),
            visible.gather(3, every[:, :, None].expand_as(visible)),
        )

    def angles(self, like: Tensor, position: Tensor, own: Tensor, new: Angles) -> Angles:
        """The angles of all tokens.

        Args:
            like: a tensor of the angles' dtype.
            position: the positions of earlier and new tokens, (B, S + n).
            own: the new tokens' positions by the model, (B, n), which may differ by a number for
                each row.
            new: their angles.
        """
        past, queries = position.tensor_split([position.shape[1] - own.shape[1]], dim=1)
        apart = (own - queries).masked_fill(queries < 0, torch.iinfo(torch.int64).min)
        old = self._rotary(like, (past + apart.amax(dim=1, keepdim=True)).clamp(min=0))
        cos, sin = (torch.cat(pair, dim=1) for pair in zip(old, new, strict=True))
        return cos, sin

    @property
    def positions(self) -> Tensor:
        """The new tokens' positions by the model, (1|B, n)."""
        position: Tensor = self._cache.position
        return position


class _Keys(NamedTuple):
    """The cache argument of an indexer: the keys of earlier tokens, (B, S, D), if there are any."""

    past: Tensor | None
    found: list[Tensor]

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        """Record the keys of new tokens, (B, n, D), and return the keys of all tokens."""
        self.found.append(keys)
        return keys if self.past is None else torch.cat([self.past, keys], dim=1)


def _chosen(
    own: Any, hidden_states: Tensor, position_embeddings: Angles, attention_mask: Any, cache: Any
) -> Tensor:
    """The forward of an indexer. With a kvkeep cache, the choice of each head is computed as if
    heads were rows, and the attention function is told of it."""
    if not isinstance(cache, _IndexCache):
        return own(hidden_states, position_embeddings, attention_mask, cache)  # type: ignore[no-any-return]
    sighted, rows = cache.sighted(), len(hidden_states)
    heads = sighted.position.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.expand(rows, heads, *x.shape[2:]).flatten(0, 1)

    def repeated(x: Tensor) -> Tensor:
        return by_head(x[:, None])

    hidden, position = repeated(hidden_states), by_head(sighted.position)
    cos, sin = (repeated(x) for x in position_embeddings)
    visible, width = by_head(sighted.visible)[:, None], own.__self__.index_head_dim
    past = None if sighted.keys is None else by_head(sighted.keys)[..., -width:]
    keys = _Keys(past, [])
    angles = cache.angles(hidden, position, repeated(cache.positions), (cos, sin))
    mask: Tensor = own(hidden, angles, visible, keys)
    chosen = None
    if not mask.equal(visible):
        most = int(mask.sum(dim=-1).max())
        places = torch.where(mask, position[:, None, None].to(torch.int32), -1)
        places = places.sort(dim=-1, descending=True).values[..., : max(most, 1)]
        chosen = places.view(rows, heads, *places.shape[2:])
    new = keys.found[0].detach().view(rows, heads, *keys.found[0].shape[1:])[:, :1]
    cache.part = IndexPart(new, chosen, cache.mask)
    return cast(Tensor, attention_mask)
