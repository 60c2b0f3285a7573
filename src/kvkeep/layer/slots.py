"""LayerSlots: what one layer holds, as the segments that attention reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec, Plain
from kvkeep.errors import OutOfMemoryError, SpecError
from kvkeep.layer.block_encoded import Bulk
from kvkeep.layer.frozen import Past, Run
from kvkeep.layer.history import Ledger
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.write_tokens import write
from kvkeep.planes import (
    POSITION,
    Chain,
    Planes,
    concatenated,
    joined,
    marked,
    norms,
    part,
    plane_bytes,
    slot_count,
    survivors,
    take,
)
from kvkeep.storage import Split, Storage, parted
from kvkeep.storage.allocate import SHORTAGE


class LayerSlots:
    """A layer's slots: those of its storage, and at times others beside it.

    - frozen: runs of older slots, shared with forks. Nothing is copied until one must be evicted.
    - aside: a chunk that does not fit fixed storage, until the policy has chosen.
    - bulk: tokens encoded a block at a time; the newest stay in the storage as they were given.
    - split: the storage itself in parts, where heads or rows have different lengths.

    Args:
        key_codec, value_codec: how a token is encoded, of equal block.
        storage: where slots lie; owned from now on.
        own: names of the planes that a policy changes.
        ragged: heads may have different lengths.
        budget: most slots that stay after a step; None: all.

    Raises:
        SpecError: the parts cannot work together.
    """

    def __init__(
        self,
        key_codec: Codec,
        value_codec: Codec,
        storage: Storage,
        *,
        own: Collection[str] = (),
        ragged: bool = False,
        budget: int | None = None,
    ) -> None:
        names = f"{key_codec.name}/{value_codec.name}"
        if key_codec.block != value_codec.block:
            raise SpecError(
                f"codecs {names} encode {key_codec.block} and {value_codec.block} tokens "
                "together; use one for both, or two that encode each token for itself"
            )
        if ragged and storage.limit is not None:
            raise SpecError(
                f"heads of different lengths need storage that grows, and {storage.name} does not; "
                "use @growing"
            )
        blocks = key_codec.block > 1
        self.bulk = Bulk(key_codec, value_codec, storage.another()) if blocks else None
        if blocks:
            budget = max(key_codec.tail, value_codec.tail) + key_codec.block
        storage.bound = 0 if ragged else budget  # a head's share of it changes
        self.ragged = ragged
        self.split = Split(storage, by_head=True) if ragged else None
        self.storage: Storage = self.split or storage
        self.limit = storage.limit
        self.rows = 0
        self.frozen = Past()
        self.aside: Planes | None = None
        self._key_dtype: torch.dtype | None = None  # of keys that are rotated where they lie
        self._own = own
        self._blank = storage.another()
        # What new tokens are encoded with: tokens of a block wait for their neighbours.
        self._new_key = key_codec if self.bulk is None else Plain()
        self._new_value = value_codec if self.bulk is None else Plain()

    @property
    def length(self) -> int:
        """Tokens held, an empty slot of a padded row included; by the longest part."""
        encoded = 0 if self.bulk is None else self.bulk.length
        return encoded + self._settled + slot_count(self.aside or {})

    @property
    def capacity(self) -> int:
        """Tokens that fit what is allocated."""
        encoded = 0 if self.bulk is None else self.bulk.capacity
        return encoded + self.frozen.length + self.storage.capacity

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, every plane included."""
        bulk = 0 if self.bulk is None else self.bulk.live_bytes
        return bulk + self._beside_bytes + self.storage.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        bulk = 0 if self.bulk is None else self.bulk.nbytes
        return bulk + self._beside_bytes + self.storage.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of frozen slots; counted once, however many rows share them."""
        bulk = 0 if self.bulk is None else self.bulk.shared_bytes
        return bulk + self.frozen.shared_bytes

    @property
    def _beside_bytes(self) -> int:
        return self.frozen.shared_bytes + self.frozen.own_bytes + plane_bytes(self.aside or {})

    @property
    def reallocations(self) -> int:
        """How often slots were copied to make room."""
        bulk = 0 if self.bulk is None else self.bulk.storage.reallocations
        return bulk + self.storage.reallocations

    def stats(self) -> LayerStats:
        """All figures at once."""
        return LayerStats(
            self.length,
            self.capacity,
            self.live_bytes,
            self.nbytes,
            self.shared_bytes,
            self.reallocations,
        )

    def require(self, n: int) -> None:
        """Raise CapacityError when n more tokens can never fit."""
        self.require_room(self._settled + n)

    def require_room(self, slots: int) -> None:
        """Raise CapacityError when so many slots can never be held."""
        self._blank.require(slots)

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
            total += norms(x.float() - codec.decode(part(planes, name), torch.float32))
        return total

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Put new tokens behind all others, with the planes `own` beside keys and values; aside,
        if they do not fit."""

        def put(slots: Planes) -> None:
            write(k, v, own, slots, self._new_key, self._new_value)

        self.rows, n = k.shape[0], k.shape[2]
        fits = self.limit is None or self._settled + n <= self.limit
        if self.aside is None and fits and self.storage.append_in_place(n, put):
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
        found = [] if self.bulk is None else self.bulk.segments()
        if self.split is not None:
            return tuple(
                Segment(
                    part.storage.read(),
                    self._new_key,
                    self._new_value,
                    head=part.head,
                    rows=part.rows,
                    part=True,
                )
                for part in self.split.parts
            )
        for run in self.frozen.runs:
            planes = run.joined if POSITION in run.own else run.planes
            found.append(Segment(planes, self._new_key, self._new_value, run.rotation))
        if self.storage.length:
            found.append(Segment(self.storage.read(), self._new_key, self._new_value))
        if self.aside is not None:
            found.append(Segment(self.aside, self._new_key, self._new_value))
        return tuple(found)

    def rewritable(self) -> Planes:
        """All slots that can be evicted, as one set; a view unless something lies beside them."""
        links = [*self._runs, *([] if self.aside is None else [self.aside])]
        return self._as_one(links) if links else self.storage.read()

    def keep(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of `rewritable()` back, where that was a copy."""
        if self.split is not None:
            self.split.keep(name, plane)
        elif self.frozen.runs or (self.aside is not None and self.storage.length):
            first = 0
            for run in self.frozen.runs:
                count = slot_count(run.planes)
                run.own[name].copy_(plane[:, :, first : first + count])
                first += count
            last = first + self.storage.length
            if self.storage.length:
                self.storage.read()[name].copy_(plane[:, :, first:last])
            if self.aside is not None:
                self.aside = {**self.aside, name: plane[:, :, last:]}

    def surplus(self, budget: int) -> int:
        """Slots held beyond a budget per head."""
        return self.length - budget if self.split is None else self.split.surplus(budget)

    def evict(self, victims: Tensor) -> None:
        """Free slots, indices into `rewritable()`; where heads are ragged, a bool (B, H, S)."""
        if self.split is not None:
            if victims.dtype != torch.bool:
                victims = marked(victims, self.split.length)
            self.split.drop(victims)
            return
        self.thaw()
        if self.aside is None:
            self.storage.evict(victims)
            return
        planes = self.rewritable()
        kept = take(planes, survivors(victims, slot_count(planes)))
        self.aside = None
        self.storage.reset()
        self.storage.append(kept)

    def pack(self) -> bool:
        """Give rows of very different numbers of tokens storages of their own, without their empty
        slots. Whether slots moved: not if there is no memory for it, nor where slots lie in other
        places too or must not move."""
        steady = self.limit is not None or self.storage.differentiable
        if steady or self.bulk is not None or self.frozen.runs or not self.storage.length:
            return False
        if self.split is not None and not self.split.loose:
            return False
        try:
            found = parted(self.storage.read(), self._blank, by_head=self.ragged)
        except (OutOfMemoryError, *SHORTAGE):
            return False
        if found is not None:
            self._hold(found)
        return found is not None

    def _hold(self, split: Split) -> None:
        """Have a storage in parts, or one that is not if there is one part only."""
        self.split = split if split.whole is None else None
        self.storage = split.whole or split

    @property
    def waiting(self) -> int:
        """Tokens that could be encoded now."""
        return 0 if self.bulk is None else self.bulk.whole(self.storage.length)

    def encode_waiting(self) -> None:
        """Encode them, the oldest tokens, once and for good."""
        assert self.bulk is not None
        self.bulk.take_oldest(self.storage)

    def positions(self) -> Tensor:
        """Positions of everything held, int32 (B, 1|H, S); -1 where a slot is empty."""
        if self.split is not None and self.split.parts:
            return self.split.read()[POSITION]
        held = [s.position.expand(self.rows, -1, -1) for s in self.segments()]
        return torch.cat(held, dim=2) if held else torch.empty(0, 1, 0, dtype=torch.int32)

    def newest_positions(self, tokens: int) -> Tensor:
        """Positions (B, tokens) of the newest ones, which nothing was evicted after."""
        if self.split is not None:
            return self.split.newest(POSITION, tokens)[:, 0]
        return self.positions()[:, 0, -tokens:]

    def ends_with_tokens(self, count: int) -> bool:
        """Whether the newest `count` slots of every row and head hold tokens."""
        places = [self.positions()]
        if self.split is not None:
            places = [segment.position for segment in self.segments()]
        return all(
            place.shape[2] >= count and bool((place[:, :, place.shape[2] - count :] >= 0).all())
            for place in places
        )

    def drop(self, tokens: int) -> None:
        """Take back the newest, which no eviction has followed."""
        aside = slot_count(self.aside or {})
        if self.aside is not None and tokens < aside:
            self.aside = {name: p[:, :, : aside - tokens] for name, p in self.aside.items()}
        else:
            self.aside = None
            tokens -= aside
            own = min(tokens, self.storage.length)
            self.storage.truncate(self.storage.length - own)
            tokens -= own
            if tokens:
                self.frozen.drop(tokens)
                self.storage = self._blank.behind(self.frozen.length)

    def mark(self) -> tuple[int, ...]:
        """How much is held, for `cut`: in each part, where heads or rows differ."""
        if self.split is not None:
            return tuple(storage.length for storage in self.split.storages)
        return (self.length,)

    def cut(self, mark: tuple[int, ...]) -> None:
        """Take back what was added since, in however many pieces it came; nothing was evicted."""
        if self.split is None:
            self.drop(max(0, self.length - mark[0]))
            return
        if not mark:
            self.split.reset()
        for storage, length in zip(self.split.storages, mark, strict=False):
            storage.truncate(min(storage.length, length))

    @property
    def torn(self) -> bool:
        """Whether an eviction failed after it had changed some parts."""
        return self.split is not None and self.split.torn

    def take_rows(self, index: Tensor) -> None:
        """Make row i a copy of the former row index[i]."""
        self.storage.rows(index)
        if self.split is not None:
            self._hold(self.split)
        if self.bulk is not None:
            self.bulk.take_rows(index)
        self.frozen.take_rows(index)
        if self.aside is not None:
            self.aside = {name: p.index_select(0, index) for name, p in self.aside.items()}
        self.rows = len(index)

    def reset(self) -> None:
        """Free every slot."""
        self.thaw(keep=False)
        self.aside = None
        if self.split is not None and not self.ragged:
            self.split, self.storage = None, self._blank.another()
        self.storage.reset()
        if self.bulk is not None:
            self.bulk.reset()

    def parts(self) -> dict[str, Planes]:
        """Everything held, by where it lies: planes to be copied."""
        found: dict[str, Planes] = {}
        if self.split is not None and self.ragged:
            return {f"head.{i}": self.split.resting_head(i) for i in self.split.heads}
        if self.bulk is not None and self.bulk.length:
            found["bulk"] = self.bulk.read(self.rows)
        if self._settled:
            frozen = self.frozen.runs
            found["slots"] = self._as_one(self._runs) if frozen else self.storage.resting()
        if self.aside is not None:
            found["aside"] = self.aside
        return found

    def load(self, parts: Mapping[str, Planes], rows: int) -> None:
        """Hold copies of what `parts` of a layer like this one gave."""
        self.reset()
        self.rows = rows
        for name, planes in parts.items():  # which may have rested on several devices
            device = planes[POSITION].device
            parts = {**parts, name: {n: planes[n].to(device) for n in planes}}
        if self.split is not None:
            self.split.load([parts[f"head.{i}"] for i in range(len(parts))])
        if self.bulk is not None and "bulk" in parts:
            self.bulk.load(parts["bulk"])
        if "slots" in parts:
            self.storage.append(parts["slots"])
        if "aside" in parts:
            self.aside = {name: plane.clone() for name, plane in parts["aside"].items()}

    def adopt(
        self,
        ledger: Ledger,
        *,
        frozen: Sequence[Run] = (),
        planes: Planes | None = None,
        length: int = 0,
    ) -> None:
        """Hold slots that lie elsewhere.

        Args:
            ledger: what they are left of.
            frozen: slots that others may hold too, behind which new ones are written.
            planes: those of fixed storage, to be written on in; `length` slots are in use.
        """
        self.rows = ledger.rows
        if planes is not None:
            self.aside = None
            self.storage.adopt(planes, length)
            return
        self.reset()
        self.frozen = Past(frozen)
        self._key_dtype = None if ledger.geometry is None else ledger.geometry.dtype
        self.storage = self._blank.behind(self.frozen.length)

    def freeze(self) -> None:
        """Make what is held immutable, so that forks share it; new tokens go behind it.

        Not what a fork copies: heads and rows of different lengths, the tail of blocks, what is
        aside, what lies on the host.
        """
        if self.bulk is not None:
            self.bulk.freeze()
        elif self.split is None and self.storage.length and self.storage.lasting:
            self.frozen.add(self.storage.read(), self._own)
            self.storage = self._blank.behind(self.frozen.length)

    def fork(self) -> LayerSlots:
        """The same slots, of which the frozen ones are shared."""
        other = copy(self)
        if self.split is None:
            other.storage, other._blank = deepcopy((self.storage, self._blank))
        else:
            other._blank = deepcopy(self._blank)
            other.storage = other.split = self.split.copied_to(other._blank)
        other.bulk = None if self.bulk is None else self.bulk.fork()
        other.aside = deepcopy(self.aside)
        other.frozen = self.frozen.fork()
        return other

    def thaw(self, *, keep: bool = True) -> None:
        """Take an own copy of what is shared, or give it up."""
        if not self.frozen.runs:
            return
        runs, storage = self._runs if keep else [], self._blank.another()
        for planes in runs:
            rows = {n: p.expand(self.rows, *p.shape[1:]) for n, p in planes.items()}
            storage.append(rows)
        self.storage, self.frozen = storage, Past()  # unless there was no memory for it

    @property
    def _runs(self) -> list[Planes]:
        """What is neither aside nor encoded in blocks, the oldest first; keys rotated for where
        they stand."""
        own = [self.storage.read()] if self.storage.length else []
        return [*self.frozen.placed(self._new_key, self._key_dtype), *own]

    def _as_one(self, runs: list[Planes]) -> Planes:
        """A view, if all of it lies in one place that is not shared."""
        return Chain(runs, self.rows) if self.frozen.runs or len(runs) > 1 else runs[0]

    @property
    def _settled(self) -> int:
        """Slots that are neither aside nor encoded in blocks."""
        return self.frozen.length + self.storage.length
