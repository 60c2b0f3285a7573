"""A cache that makes the decisions of another run again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvkeep.hf.cache import Cache
from kvkeep.hf.config import base_config, layer_kinds
from kvkeep.host import Specs, per_layer
from kvkeep.layer.layer import LayerCache
from kvkeep.policy import ReplayPolicy
from kvkeep.storage import Concat

Decisions = list[list[Tensor]]
"""Each layer's evictions, call by call: positions, see `ReplayPolicy`."""


def replaying(model: Any, spec: Specs, decisions: Decisions) -> Cache:
    """A cache through which plain autograd goes, and which evicts what was evicted before when the
    same chunks are fed: `kvkeep.train.backward` finds the gradients that this gives, without all
    activations in memory.

    Args:
        model: attached.
        spec: that of the run.
        decisions: what `backward(decisions=...)` collected.
    """
    kinds = layer_kinds(base_config(model))
    cache = Cache(model, [one.differentiable() for one in per_layer(spec, kinds)])
    for index, made in enumerate(decisions):
        old = cache.layers[index]
        cache.layers[index] = LayerCache(
            ReplayPolicy(old.policy, made),
            old.key_codec,
            old.value_codec,
            Concat(),
            window=old.window,
        )
    return cache
