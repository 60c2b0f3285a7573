"""Whether a cache can record drafts, for all hosts."""

from __future__ import annotations

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature


def require_recordable(cache: Cache, *, attached: bool) -> None:
    """Raise UnsupportedError if evictions with drafts would differ from evictions without.

    Args:
        attached: whether kvkeep computes the model's attention.
    """
    for layer in cache.layers:
        layer.drafts.require_recordable()
        if layer.setup.by_token and (reason := cache.why_not(Feature.DRAFTED)):
            raise UnsupportedError(
                f"the model {reason}, such as {layer.policy.name}; use keep_all or a window, or do "
                "not draft"
            )
        if layer.setup.by_token and not attached:
            raise UnsupportedError(
                f"rejected draft tokens must be cropped, and policy {layer.policy.name} decides "
                "after each token, which the model's own attention does not support; call "
                "kvkeep.attach(model), use keep_all or a window, or do not draft"
            )
