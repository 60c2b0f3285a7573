"""What a layer holds, in numbers: measured, and promised before anything is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvkeep.codec import Codec, Plain
from kvkeep.planes import POSITION, PlaneSpec
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


def promised_bytes(
    policy: Policy,
    key_codec: Codec,
    value_codec: Codec,
    tokens: int,
    *,
    heads: int,
    key_width: int,
    value_width: int,
    dtype: torch.dtype,
    rows: int = 1,
) -> int:
    """What a layer's `live_bytes` will be after `tokens` columns; at least that for ragged heads
    and several rows, for a head frees what no row needs."""
    kept = tokens if policy.budget is None else min(tokens, policy.budget)
    own = {POSITION: PlaneSpec((), torch.int32, shared=not policy.per_head), **policy.planes}

    def slot_bytes(key: Codec, value: Codec) -> int:
        encoded = [*key.planes(key_width, dtype).values()]
        encoded += value.planes(value_width, dtype).values()
        beside = sum(spec.slot_bytes(heads) for spec in own.values())
        return key.block * beside + sum(spec.slot_bytes(heads) for spec in encoded)

    block, tail = key_codec.block, max(key_codec.tail, value_codec.tail)
    if block == 1:
        return rows * kept * slot_bytes(key_codec, value_codec)
    blocks = max(0, kept - tail) // block
    plain = (kept - blocks * block) * slot_bytes(Plain(), Plain())
    return rows * (blocks * slot_bytes(key_codec, value_codec) + plain)
