"""Checks, before any token is fed, that a cache's specs meet the demands of a call, and agree with
a model's own attention and mask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.host import ModelCache
from kvkeep.host.drafts import require_recordable
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach
from kvkeep.spec import CacheSpec


@dataclass(frozen=True)
class Demands:
    """The demands of a call of `generate()` on its cache.

    Args:
        drafts: drafted tokens must be cropped.
        weights: attention weights over all tokens are returned, up to `columns` columns.
        columns: the most columns that will be fed.
        routed: kvkeep computes the attention.
    """

    drafts: bool
    weights: bool
    columns: int
    routed: bool

    def require(self, cache: Cache) -> None:
        """Raise UnsupportedError if the cache cannot meet the demands."""
        if self.drafts:
            require_recordable(cache, attached=self.routed)
        if self.weights:
            require_whole(cache.layers, self.columns - cache.fed)


def require_whole(layers: Iterable[LayerCache], tokens: int = 1) -> None:
    """Raise UnsupportedError if layers cannot return attention weights over all tokens while
    `tokens` more tokens are fed one by one, because they have evicted tokens or will.

    A layer with a sliding window holds all tokens that its queries may see, as in transformers' own
    cache.
    """
    for index, layer in enumerate(layers):
        policy, held, fed = layer.policy, layer.length, layer.fed
        if layer.window is not None and policy.reach == Reach(layer.window):
            continue
        before = fed + tokens - 1
        budget = policy.at(before).budget
        if held != fed or (policy.ragged and layer.history.floor):
            why = f"layer {index} holds {held} slots for the {fed} tokens that were fed"
        elif budget is not None and before > budget:
            why = f"layer {index} keeps only {budget} of {before} tokens"
        elif policy.step is not None:
            why = f"layer {index} may divide a chunk into steps of {policy.step} and evict between"
        else:
            continue
        raise UnsupportedError(
            f"output_attentions asks for weights over all tokens, but {why} (policy "
            f"{policy.name}); use a keep_all cache, or leave out output_attentions"
        )


def require_exact(cache: ModelCache, name: str, own: str) -> None:
    """Raise UnsupportedError unless every layer of a cache keeps all slots that its queries may
    see, and its policy does not change attention.

    Args:
        name: the model's type.
        own: why the model computes attention itself.
    """
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        if _asks(layer):
            changed = "changes how attention is computed"
        elif not _is_exact(layer):
            changed = "changes which tokens are seen"
        else:
            continue
        raise UnsupportedError(
            f"{spec} {changed}, but {name} computes attention itself, because {own}; use "
            "keep_all, with any storage and codec, such as keep_all+int8"
        )


def _asks(layer: LayerCache) -> bool:
    """Whether a layer's policy needs results that a model's own attention lacks."""
    return bool(layer.policy.needs) or layer.policy.ragged


def _is_exact(layer: LayerCache) -> bool:
    policy = layer.policy
    return not policy.evicts or (layer.window is not None and policy.reach == Reach(layer.window))


def require_fitting_mask(
    layer: LayerCache, spec: CacheSpec, k: Tensor, *, alike: bool, remedy: str
) -> None:
    """Raise UnsupportedError if the model's own mask would not agree with the spec.

    Args:
        k: the new keys (B, H, n, D).
        alike: whether all layers of a type have one spec.
        remedy: the advice at the end of the error.
    """
    policy = layer.policy
    if not alike:
        raise UnsupportedError(
            "layers of one type have different specs, but the model's own attention uses one mask "
            f"for them; {remedy}"
        )
    if _asks(layer):
        raise UnsupportedError(
            f"{spec} changes how attention is computed, which the model does itself; {remedy}"
        )
    window = layer.window
    if window and layer.chunked and layer.fed + k.shape[2] > window:
        raise UnsupportedError(
            f"{window.words}, whose chunks begin where padding ends, but the model's own attention "
            f"does not tell its cache where that is; {remedy}"
        )
    exact = _is_exact(layer)
    over = layer.fed + k.shape[2] > (policy.budget or 0)
    if not exact and over:
        contiguous = policy.reach is not None and not policy.reach.fixed
        if k.shape[0] > 1 or k.shape[2] > 1 or not contiguous:
            raise UnsupportedError(
                f"{spec} with {k.shape[0]} rows and {k.shape[2]} new tokens after {layer.fed}: the "
                f"model's own mask takes neither padding nor eviction into account; {remedy}"
            )
