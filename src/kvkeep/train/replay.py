"""A cache that repeats the evictions of another run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvkeep.host import Specs, host_of, per_layer
from kvkeep.host.cache import ModelCache
from kvkeep.layer.layer import LayerCache
from kvkeep.policy import ReplayPolicy
from kvkeep.storage import Concat

Decisions = list[list[Tensor]]
"""For each layer, the positions evicted by each call; see `ReplayPolicy`."""


def replaying(model: Any, spec: Specs, decisions: Decisions) -> ModelCache:
    """A cache that repeats recorded evictions when it is fed the same chunks. Autograd can
    differentiate through it, with the gradients of `kvkeep.train.backward`, but keeps all
    activations in memory.

    Args:
        model: an attached model.
        spec: spec of the recorded run.
        decisions: the list that `backward(decisions=...)` filled.
    """
    host = host_of(model)
    cache = host.new_cache([one.differentiable() for one in per_layer(spec, host.kinds)])
    for index, made in enumerate(decisions):
        old = cache.layers[index]
        cache.layers[index] = LayerCache(
            ReplayPolicy(old.policy, made),
            old.key_codec,
            old.key_codec if old.latent else old.value_codec,
            Concat(),
            window=old.window,
            readers=old.cursor.readers,
            slopes=old.slopes,
            latent=old.latent,
        )
    return cache
