"""LayerSlots: what one layer holds, as the segments that attention reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.attention import Segment, View
from kvkeep.codec import Codec, Plain
from kvkeep.errors import SpecError
from kvkeep.planes import (
    POSITION,
    Planes,
    PlaneSpec,
    along_slots,
    concatenated,
    joined,
    part,
    plane_bytes,
    slot_count,
    survivors,
    take,
)
from kvkeep.storage import PerHead, Storage


@dataclass(frozen=True)
class LayerStats:
    """One layer's figures; bytes over all rows and heads."""

    length: int
    capacity: int
    live_bytes: int
    nbytes: int
    reallocations: int


class LayerSlots:
    """A layer's slots: those of its storage, and at times others beside it.

    - aside: a chunk that does not fit fixed storage, until the policy has chosen.
    - bulk: tokens encoded a block at a time; the newest stay in the storage as they were given.

    Args:
        key_codec, value_codec: how a token is encoded, of equal block.
        storage: where slots lie; owned from now on.
        ragged: heads may have different lengths.

    Raises:
        SpecError: the parts cannot work together.
    """

    def __init__(
        self, key_codec: Codec, value_codec: Codec, storage: Storage, *, ragged: bool = False
    ) -> None:
        names = f"{key_codec.name}/{value_codec.name}"
        if key_codec.block != value_codec.block:
            raise SpecError(
                f"codecs {names} encode {key_codec.block} and {value_codec.block} tokens "
                "together; use one for both, or two that encode each token for itself"
            )
        if key_codec.block > 1 and storage.limit is not None:
            raise SpecError(
                f"codecs {names} encode a prompt after it was attended to, for which "
                f"{storage.name} storage has no room; use @growing"
            )
        self.key_codec = key_codec
        self.value_codec = value_codec
        if ragged and storage.limit is not None:
            raise SpecError(
                f"heads of different lengths need storage that grows, and {storage.name} does not; "
                "use @growing"
            )
        self.ragged = PerHead(storage) if ragged else None
        self.storage: Storage = self.ragged or storage
        self.aside: Planes | None = None
        self.bulk = storage.another() if key_codec.block > 1 else None
        # What new tokens are encoded with: tokens of a block wait for their neighbours.
        self._new_key = key_codec if self.bulk is None else Plain()
        self._new_value = value_codec if self.bulk is None else Plain()

    @property
    def length(self) -> int:
        """Tokens held, the same for every row; an empty slot of a padded row counts."""
        return self._encoded + self.storage.length + slot_count(self.aside or {})

    @property
    def capacity(self) -> int:
        """Tokens that fit what is allocated."""
        bulk = 0 if self.bulk is None else self.bulk.capacity * self.key_codec.block
        return bulk + self.storage.capacity

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, every plane included."""
        return sum(s.live_bytes for s in self._storages) + plane_bytes(self.aside or {})

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(s.nbytes for s in self._storages) + plane_bytes(self.aside or {})

    @property
    def reallocations(self) -> int:
        """How often slots were copied to make room."""
        return sum(s.reallocations for s in self._storages)

    def stats(self) -> LayerStats:
        """All figures at once."""
        return LayerStats(
            self.length, self.capacity, self.live_bytes, self.nbytes, self.reallocations
        )

    def token_bytes(
        self,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        heads: int,
        own: Mapping[str, PlaneSpec],
        tokens: int,
    ) -> int:
        """Bytes that `tokens` tokens of one row take, with the planes `own` beside k and v."""

        def slot(key: Codec, value: Codec, block: int) -> int:
            encoded = [*key.planes(key_width, dtype).values()]
            encoded += value.planes(value_width, dtype).values()
            beside = sum(block * _plane_bytes(spec, heads) for spec in own.values())
            return beside + sum(_plane_bytes(spec, heads) for spec in encoded)

        block = self.key_codec.block
        blocks = self._whole_blocks(tokens) // block
        left = tokens - blocks * block
        return blocks * slot(self.key_codec, self.value_codec, block) + left * slot(
            self._new_key, self._new_value, 1
        )

    def encoded(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The planes of new keys and values."""
        keys, values = self._new_key.encode(k), self._new_value.encode(v)
        return joined(keys, "k") | joined(values, "v")

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """What encoding changes, fp32 (B, H, n): |k - k'| + |v - v'|, Euclidean norms."""
        planes = self.encoded(k, v)
        pairs = ((k, self._new_key, "k"), (v, self._new_value, "v"))
        total = torch.zeros(k.shape[:3], device=k.device)
        for x, codec, name in pairs:
            total += (x.float() - codec.decode(part(planes, name), torch.float32)).norm(dim=-1)
        return total

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Put new tokens behind all others, with the planes `own` beside keys and values; aside,
        if they do not fit."""

        def write(slots: Planes) -> None:
            self._new_key.encode_into(k, slots, "k")
            self._new_value.encode_into(v, slots, "v")
            for name, plane in own.items():
                slots[name].copy_(plane)

        limit, n = self.storage.limit, k.shape[2]
        fits = limit is None or self.storage.length + n <= limit
        if self.aside is None and fits and self.storage.append_in_place(n, write):
            return
        planes = self.encoded(k, v) | dict(own)
        if self.aside is not None:
            self.aside = concatenated(self.aside, planes)
        elif not fits:
            self.aside = {name: plane.clone() for name, plane in planes.items()}
        else:
            self.storage.append(planes)

    def segments(self) -> tuple[Segment, ...]:
        """Everything held, newest last; nothing is copied."""
        found = []
        if self._encoded and self.bulk is not None:
            found.append(Segment(self.bulk.read(), self.key_codec, self.value_codec))
        if self.ragged is not None:
            return tuple(
                Segment(storage.read(), self._new_key, self._new_value, head=index)
                for index, storage in enumerate(self.ragged.heads)
            )
        if self.storage.length:
            found.append(Segment(self.storage.read(), self._new_key, self._new_value))
        if self.aside is not None:
            found.append(Segment(self.aside, self._new_key, self._new_value))
        return tuple(found)

    def rewritable(self) -> Planes:
        """All slots that can be evicted, as one set; a view unless something is aside."""
        if self.aside is None:
            return self.storage.read()
        if not self.storage.length:
            return self.aside
        return concatenated(self.storage.read(), self.aside)

    def keep(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of `rewritable()` back, where that was a copy."""
        if self.ragged is not None:
            self.ragged.keep(name, plane)
        if self.aside is not None and self.storage.length:
            count = self.storage.length
            self.storage.read()[name].copy_(plane[:, :, :count])
            self.aside = {**self.aside, name: plane[:, :, count:]}

    def surplus(self, budget: int) -> int:
        """Slots held beyond a budget per head."""
        if self.ragged is not None:
            return sum(head.length - budget for head in self.ragged.heads)
        return self.length - budget

    def evict(self, victims: Tensor) -> None:
        """Free slots, indices into `rewritable()`; where heads are ragged, a bool (B, H, S)."""
        if self.ragged is not None:
            self.ragged.drop(victims)
            return
        if self.aside is None:
            self.storage.evict(victims)
            return
        planes = self.rewritable()
        kept = take(planes, survivors(victims, slot_count(planes)))
        self.aside = None
        self.storage.reset()
        self.storage.append(kept)

    @property
    def waiting(self) -> int:
        """Tokens that could be encoded now."""
        return self._whole_blocks(self.storage.length)

    def _whole_blocks(self, tokens: int) -> int:
        """How many of `tokens` tokens are encoded in blocks when they have settled."""
        if self.bulk is None:
            return 0
        block, tail = self.key_codec.block, max(self.key_codec.tail, self.value_codec.tail)
        return max(0, tokens - tail) // block * block

    def encode_waiting(self) -> None:
        """Encode the oldest tokens that wait, once and for good."""
        count, block = self.waiting, self.key_codec.block
        assert self.bulk is not None
        planes = self.storage.read()
        oldest = planes[POSITION].argsort(dim=2, stable=True)[:, :, :count]
        taken = take(planes, oldest)
        for name in ("k", "v"):
            # What stands in empty slots is nobody's, and must not widen a block's range.
            blocks = taken[name].reshape(*taken[name].shape[:2], -1, block, taken[name].shape[3])
            empty = taken[POSITION].reshape(*taken[POSITION].shape[:2], -1, block, 1) < 0
            taken[name] = torch.where(empty, blocks[:, :, :, -1:], blocks).flatten(2, 3)
        encoded = joined(self.key_codec.encode(taken["k"]), "k") | joined(
            self.value_codec.encode(taken["v"]), "v"
        )
        encoded[POSITION] = taken[POSITION].reshape(*taken[POSITION].shape[:2], -1, block)
        self.bulk.append(encoded)
        self.storage.evict(oldest)

    def positions(self) -> Tensor:
        """Positions of everything held, int32 (B, 1|H, S); -1 where a slot is empty."""
        held = [segment.position for segment in self.segments()]
        return torch.cat(held, dim=2) if held else torch.empty(0, 1, 0, dtype=torch.int32)

    def newest_positions(self, tokens: int) -> Tensor:
        """Positions (B, tokens) of the newest ones, which nothing was evicted after."""
        planes = self.rewritable() if self.ragged is None else self.ragged.heads[0].read()
        return planes[POSITION][:, 0, -tokens:]

    def drop(self, tokens: int) -> None:
        """Take back the newest, which no eviction has followed."""
        aside = slot_count(self.aside or {})
        if self.aside is not None and tokens < aside:
            self.aside = {name: p[:, :, : aside - tokens] for name, p in self.aside.items()}
        else:
            self.aside = None
            self.storage.truncate(self.storage.length - (tokens - aside))

    def take_rows(self, index: Tensor) -> None:
        """Make row i a copy of the former row index[i]."""
        for storage in self._storages:
            storage.rows(index)
        if self.aside is not None:
            self.aside = {name: p.index_select(0, index) for name, p in self.aside.items()}

    def reset(self) -> None:
        """Free every slot."""
        self.aside = None
        for storage in self._storages:
            storage.reset()

    @property
    def _storages(self) -> tuple[Storage, ...]:
        return (self.storage,) if self.bulk is None else (self.bulk, self.storage)

    @property
    def _encoded(self) -> int:
        return 0 if self.bulk is None else self.bulk.length * self.key_codec.block


def _plane_bytes(spec: PlaneSpec, heads: int) -> int:
    """Bytes of one slot of a plane in one row."""
    return math.prod(spec.shape) * spec.dtype.itemsize * (1 if spec.shared else heads)


def in_order(
    view: View, key_dtype: torch.dtype, value_dtype: torch.dtype, *, moved: bool
) -> tuple[Tensor, Tensor]:
    """Keys (B, H, S, Dk) and values (B, H, S, Dv) of a view, by position if slots were `moved`."""
    first, *more = view.segments
    keys, values = first.keys(key_dtype), first.values(value_dtype)
    if more:
        keys = torch.cat([keys, *(segment.keys(key_dtype) for segment in more)], dim=2)
        values = torch.cat([values, *(segment.values(value_dtype) for segment in more)], dim=2)
    if not moved:
        return keys, values
    position = torch.cat([segment.position for segment in view.segments], dim=2)
    order = position.argsort(dim=2, stable=True)
    return keys.gather(2, along_slots(order, keys)), values.gather(2, along_slots(order, values))
