"""What a layer holds, in numbers: measured, and promised before anything is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvkeep.codec import Codec, Plain
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION, PlaneSpec, joined
from kvkeep.policy import Policy


@dataclass(frozen=True)
class LayerStats:
    """One layer's figures; bytes over all rows and heads, of which `shared_bytes` lie in frozen
    slots that other caches may hold too."""

    length: int
    capacity: int
    live_bytes: int
    nbytes: int
    shared_bytes: int
    reallocations: int


def slot_planes(
    policy: Policy, key_codec: Codec, value_codec: Codec, geometry: Geometry
) -> dict[str, PlaneSpec]:
    """The planes of slots of these codecs, the policy's among them."""
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
) -> int:
    """What a layer's `live_bytes` will be after `tokens` columns; at least that for ragged heads
    and several rows, for a head frees what no row needs."""
    kept = tokens if policy.budget is None else min(tokens, policy.budget)

    def slot_bytes(key: Codec, value: Codec) -> int:
        specs = slot_planes(policy, key, value, geometry)
        return sum(spec.slot_bytes(geometry.heads) for spec in specs.values())

    block, tail = key_codec.block, max(key_codec.tail, value_codec.tail)
    if block == 1:
        return geometry.rows * kept * slot_bytes(key_codec, value_codec)
    blocks = max(0, kept - tail) // block
    plain = (kept - blocks * block) * slot_bytes(Plain(), Plain())
    return geometry.rows * (blocks * slot_bytes(key_codec, value_codec) + plain)
