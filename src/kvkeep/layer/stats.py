"""A layer's memory figures, measured or predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvkeep.codec import Codec, encoded_count, keeps_plain
from kvkeep.codec.plain import Plain
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION, PlaneSpec, joined
from kvkeep.policy import Policy


@dataclass(frozen=True)
class LayerStats:
    """One layer's figures, in slots and bytes over all rows and heads. `shared_bytes`: bytes of
    frozen slots, which other caches may share; `kept`: share of the tokens fed that the layer
    holds, averaged over heads."""

    length: int
    capacity: int
    live_bytes: int
    nbytes: int
    shared_bytes: int
    reallocations: int
    kept: float = 1.0


def slot_planes(
    policy: Policy, key_codec: Codec, value_codec: Codec, geometry: Geometry
) -> dict[str, PlaneSpec]:
    """The planes of a slot: encoded keys and values, position, and the policy's planes."""
    specs = joined(key_codec.planes(geometry.key_width, geometry.dtype), "k")
    specs |= joined(value_codec.planes(geometry.value_width, geometry.dtype), "v")
    tokens = (key_codec.block,) if key_codec.block > 1 else ()
    specs[POSITION] = PlaneSpec(tokens, torch.int32, shared=not policy.per_head)
    return specs | policy.planes


def promised_bytes(
    policy: Policy,
    key_codec: Codec,
    value_codec: Codec,
    tokens: int,
    geometry: Geometry,
    *,
    late: bool | None = None,
) -> int:
    """Predict a layer's `live_bytes` after `tokens` columns. For heads of different lengths and
    several rows, it is a lower bound, because a head frees only slots that no row needs. `late`:
    whether the layer has a plain tail; None: as in storage that grows."""
    budget = policy.at(tokens).budget
    kept = tokens if budget is None else min(tokens, budget)

    def slot_bytes(key: Codec, value: Codec) -> int:
        specs = slot_planes(policy, key, value, geometry)
        return sum(spec.slot_bytes(geometry.heads) for spec in specs.values())

    encoded = kept
    if keeps_plain(key_codec, value_codec) if late is None else late:
        encoded = encoded_count(kept, key_codec, value_codec, budget=budget)
    each = encoded // key_codec.block * slot_bytes(key_codec, value_codec)
    waiting = slot_bytes(key_codec.waiting(Plain()), value_codec.waiting(Plain()))
    return geometry.rows * (each + (kept - encoded) * waiting)
