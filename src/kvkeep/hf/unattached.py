"""Check that a model's own attention and mask agree with the cache's spec."""

from __future__ import annotations

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host import ModelCache
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach
from kvkeep.spec import CacheSpec


def require_exact(cache: ModelCache, own: str) -> None:
    """Raise UnsupportedError unless every layer of a cache keeps all that its queries may see.

    Args:
        own: why the model computes attention itself.
    """
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        if not _is_exact(layer):
            raise UnsupportedError(
                f"{spec} changes what is attended to, but the model computes attention itself, "
                f"because {own}; use keep_all, with any storage and codec"
            )


def _is_exact(layer: LayerCache) -> bool:
    policy = layer.policy
    return not policy.evicts or (layer.window is not None and policy.reach == Reach(layer.window))


def require_fitting_mask(layer: LayerCache, spec: CacheSpec, k: Tensor, *, alike: bool) -> None:
    """Raise UnsupportedError if the model's own mask would not agree with the spec.

    Args:
        k: the new keys (B, H, n, D).
        alike: whether all layers of a type have one spec.
    """
    policy = layer.policy
    if not alike:
        raise UnsupportedError(
            "layers of one type have different specs, but the model uses one mask for them; call "
            "kvkeep.attach(model) first"
        )
    if policy.needs or policy.ragged:
        raise UnsupportedError(
            f"{spec} changes how attention is computed, which an unattached model does itself; "
            "call kvkeep.attach(model) first"
        )
    window = layer.window
    if window and layer.chunked and layer.fed + k.shape[2] > window:
        raise UnsupportedError(
            f"{window.words}, whose chunks begin where padding ends, "
            "which an unattached model does not tell its cache; call kvkeep.attach(model) first"
        )
    exact = _is_exact(layer)
    over = layer.fed + k.shape[2] > (policy.budget or 0)
    if not exact and over:
        contiguous = policy.reach is not None and not policy.reach.fixed
        if k.shape[0] > 1 or k.shape[2] > 1 or not contiguous:
            raise UnsupportedError(
                f"{spec} with {k.shape[0]} rows and {k.shape[2]} new tokens after {layer.fed}: the "
                "model's own mask takes neither padding nor eviction into account; call "
                "kvkeep.attach(model) first"
            )
