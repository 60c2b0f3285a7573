"""Check that the mask of an unattached model agrees with the cache's spec."""

from __future__ import annotations

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach
from kvkeep.spec import CacheSpec


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
    exact = not policy.evicts or (layer.window is not None and policy.reach == Reach(layer.window))
    over = layer.fed + k.shape[2] > (policy.budget or 0)
    if not exact and over:
        contiguous = policy.reach is not None and not policy.reach.fixed
        if k.shape[0] > 1 or k.shape[2] > 1 or not contiguous:
            raise UnsupportedError(
                f"{spec} with {k.shape[0]} rows and {k.shape[2]} new tokens after {layer.fed}: the "
                "model's own mask takes neither padding nor eviction into account; call "
                "kvkeep.attach(model) first"
            )
