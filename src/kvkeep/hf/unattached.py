"""Check that a model's own attention and mask agree with the cache's spec."""

from __future__ import annotations

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host import ModelCache
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach
from kvkeep.spec import CacheSpec


def require_exact(cache: ModelCache, name: str, own: str) -> None:
    """Raise UnsupportedError unless every layer of a cache keeps all that its queries may see, and
    asks nothing of attention.

    Args:
        name: the model's type.
        own: why the model computes attention itself.
    """
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        if _asks(layer):
            changed = "changes how attention is computed"
        elif not _is_exact(layer):
            changed = "changes what is attended to"
        else:
            continue
        raise UnsupportedError(
            f"{spec} {changed}, but {name} computes attention itself, because {own}; use "
            "keep_all, with any storage and codec, such as keep_all+int8"
        )


def _asks(layer: LayerCache) -> bool:
    """Whether a layer's policy asks something of attention that a model's own does not do."""
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
        remedy: what works instead.
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
            f"{window.words}, whose chunks begin where padding ends, "
            f"which the model's own attention does not tell its cache; {remedy}"
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
