"""BlockEncoded: slots whose tokens are encoded several at a time, each token once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import final

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec, encoded_count, plain_count
from kvkeep.errors import SpecError
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History
from kvkeep.layer.parted import ByHead
from kvkeep.layer.slots import Codecs, LayerSlots, Observed
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.undivided import Undivided
from kvkeep.planes import POSITION, Planes, slot_count, take
from kvkeep.storage import Storage

_BLOCKS = "bulk"  # the name of `blocks` in saved caches


@final
class BlockEncoded(LayerSlots):
    """`blocks`, with one encoded token or block of tokens per slot, and a `tail` of plain tokens:
    the newest tokens and the codecs' sinks. If each slot of `blocks` holds one token, no row has
    padding and no token was evicted, both parts are in the order of positions, so encoded tokens
    can be cut off too. A policy observes all slots, and evicts slots of `blocks`.

    Args:
        codecs: with equal block lengths.
        storage: holds the tail; this object takes ownership. The blocks get an empty copy of it,
            whose bound is this storage's bound less the plain tokens.
        own: names of the planes that a policy changes.

    Raises:
        SpecError: the storage is fixed, so it may lack room for a prompt that is not encoded yet;
            or only one storage of this kind can be read at a time.
    """

    late = True

    def __init__(
        self,
        codecs: Codecs,
        storage: Storage,
        own: Collection[str] = (),
        *,
        ragged: bool = False,
    ) -> None:
        names = f"{codecs.key.name}/{codecs.value.name}"
        if storage.limit is not None:
            raise SpecError(
                f"codecs {names} encode a prompt after attention, and {storage.name} storage may "
                "have no room for it until then; use @growing"
            )
        if not storage.lasting:
            raise SpecError(
                f"codecs {names} read two storages together, blocks and a tail, but only one "
                f"{storage.name} storage can be read at a time; use int8, or @growing"
            )
        bound = storage.bound
        if bound:
            storage.bound = bound - plain_count(*codecs, budget=bound)
        blocks = storage.empty_copy()
        self.blocks: Undivided | ByHead = (
            ByHead(codecs, blocks) if ragged else Undivided(codecs, own, blocks)
        )
        storage.bound = plain_count(*codecs, budget=bound or None) + codecs.key.block
        self.tail = Undivided(codecs.unencoded, own, storage)
        self.codecs = self.tail.codecs
        self._each, self.by_token = codecs.key.block, codecs.key.block == 1
        self.ragged, self._own = ragged, own

    @property
    def storage(self) -> Storage:  # type: ignore[override]
        return self.tail.storage

    @property
    def length(self) -> int:
        return self.blocks.length * self._each + self.plain

    @property
    def stats(self) -> LayerStats:
        one, two = self.blocks.stats, self.tail.stats
        return LayerStats(
            self.length,
            one.capacity * self._each + two.capacity,
            one.live_bytes + two.live_bytes,
            one.nbytes + two.nbytes,
            one.shared_bytes + two.shared_bytes,
            one.reallocations + two.reallocations,
        )

    def segments(self) -> tuple[Segment, ...]:
        return self.blocks.segments() + self.tail.segments()

    def positions(self, *, newest_last: bool = False) -> Tensor:
        held = [slots.positions() for slots in (self.blocks, self.tail) if slots.length]
        return torch.cat(held, dim=2) if held else self.tail.positions()

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        self.tail.add(k.to(v.dtype), v, own)  # keys less a centre may be float32

    @property
    def hidden(self) -> int:  # type: ignore[override]
        return sum(self.hides)

    @property
    def hides(self) -> tuple[int, ...]:
        return self.blocks.hidden, self.tail.hidden

    @hides.setter
    def hides(self, counts: tuple[int, ...]) -> None:
        self.blocks.hidden, self.tail.hidden = counts

    def evictable(self) -> Planes:
        return self.blocks.evictable()

    def write_plane(self, name: str, plane: Tensor) -> None:
        self.blocks.write_plane(name, plane)

    def observed(self) -> Observed:
        """As `LayerSlots.observed`. Nothing changes the positions of blocks of tokens."""
        some = (self.blocks, self.tail) if self.by_token else (self.tail,)
        return Observed(tuple(one for one in some if one.length) or (self.tail,))

    def surplus(self, budget: int) -> int:
        return self.blocks.surplus(budget - self.plain)

    @property
    def plain(self) -> int:  # type: ignore[override]
        return self.tail.length - self.tail.hidden

    def evict(self, victims: Tensor) -> None:
        self.blocks.evict(victims)

    def hide(self, victims: Tensor, count: int) -> None:
        self.blocks.hide(victims, count)

    def waiting(self, budget: int | None, more: int = 0) -> int:
        tokens = self.plain + more
        return encoded_count(tokens, *self.blocks.codecs, budget=budget)

    def encode_waiting(self, count: int, *, hide: bool = False) -> bool:
        planes = self.tail.evictable()
        order = order_of_encoding(planes[POSITION], *self.blocks.codecs)
        first = self.tail.hidden  # hidden slots come first in the order: their position is -1
        oldest = order[:, :, first : first + count]
        taken = take(planes, oldest)
        position = taken[POSITION]
        held = self.codecs.decode(taken, taken["k"].dtype)
        k, v = (filled(x, position, self._each) for x in held)
        encoded = self.blocks.codecs.encode(k, v)
        if not self.by_token:
            position = position.reshape(*position.shape[:2], -1, self._each)
        encoded[POSITION] = position
        encoded |= {name: taken[name] for name in self._own}
        rows = position.shape[0]
        self.blocks.storage_for(slot_count(encoded), rows).append(encoded)
        end = first + oldest.shape[2]
        if hide:
            self.tail.hide(order[:, :, :end], end)
        elif self.by_token:
            return _kept(self.tail, order[:, :, end:]) and bool((position >= 0).all())
        else:
            self.tail.evict(oldest)
        return False

    def free_hidden(self) -> bool:
        if not self.by_token:
            return self.tail.free_hidden()
        exact = not self.blocks.hidden or self.blocks.free_hidden()
        order = self.tail.evictable()[POSITION].argsort(dim=2, stable=True)
        kept, self.tail.hidden = order[:, :, self.tail.hidden :], 0
        return _kept(self.tail, kept) and exact

    def free(self, gone: Tensor) -> None:
        # All heads share the tail, so all tokens up to the newest that some head frees leave it.
        position = self.tail.positions().to(torch.int64)
        at = position.gather(2, order_of_encoding(position, *self.blocks.codecs))
        goes = gone.to(at.device).gather(2, at.clamp(min=0)) & (at >= 0)
        if bool(goes.any()):
            self.encode_waiting(1 + int(goes.nonzero()[:, 2].max()))
        self.blocks.free(gone)

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        # From the newest on: the tail's tokens except its sinks, then the encoded tokens.
        sinks = max(codec.sinks for codec in self.blocks.codecs)
        encoded = 0
        if self.by_token:
            encoded = min(self.blocks.length, max(0, fewer - max(0, self.tail.length - sinks)))
        return self.blocks.mark(encoded) + self.tail.mark(fewer - encoded)

    def cut(self, mark: tuple[int, ...]) -> None:
        self.blocks.cut(mark[:-1])
        self.tail.cut(mark[-1:])

    def take_rows(self, index: Tensor) -> BlockEncoded:
        self.blocks.take_rows(index)
        self.torn = True
        self.tail.take_rows(index)
        self.torn = False
        return self

    def parts(self) -> dict[str, Planes]:
        blocks = self.blocks.parts()
        if "slots" in blocks:
            blocks[_BLOCKS] = blocks.pop("slots")
        return blocks | self.tail.parts()

    def load(self, parts: Mapping[str, Planes], rows: int) -> BlockEncoded:
        tail = {name: parts[name] for name in ("slots", "aside") if name in parts}
        blocks = {name: parts[name] for name in parts.keys() - tail.keys()}
        if _BLOCKS in blocks:
            blocks["slots"] = blocks.pop(_BLOCKS)
        self.torn = False
        self.blocks.load(blocks, rows)
        self.tail.load(tail, rows)
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        """Replace the contents by plain tokens, which the next step encodes."""
        self.load({}, history.rows)
        self.tail.adopt_frozen(runs, history)

    def freeze(self) -> None:
        """Freeze the blocks; forks copy the tail."""
        self.blocks.freeze()

    def thaw(self) -> None:
        """Copy the shared slots of the tail, before their keys change."""
        self.tail.thaw()

    def fork(self) -> BlockEncoded:
        other = copy(self)
        other.blocks, other.tail = self.blocks.fork(), self.tail.fork()
        return other


def _kept(tail: Undivided, index: Tensor) -> bool:
    """Keep only the slots of a tail at `index`, in the order of their positions. Return whether all
    of them hold tokens."""
    planes = tail.evictable()
    place = planes[POSITION].gather(2, index)
    kept = take(planes, index.gather(2, place.argsort(dim=2, stable=True)))
    tail.load({}, len(place))
    if slot_count(kept):
        tail.storage_for(slot_count(kept), len(place)).append(kept)
    return bool((place >= 0).all())


def order_of_encoding(position: Tensor, *codecs: Codec) -> Tensor:
    """The indices of plain tokens in encoding order: ascending `position` (B, 1|H, n), with the
    codecs' sinks last. So each row's sinks and newest tokens come last and stay plain, also in a
    row shorter than the longest."""
    sinks = max(codec.sinks for codec in codecs)
    first = (position >= 0) & (position < sinks)
    last = torch.iinfo(position.dtype).max
    return position.masked_fill(first, last).argsort(dim=2, stable=True)


def filled(x: Tensor, position: Tensor, block: int) -> Tensor:
    """Replace padding in tokens x (B, H, n, D) by the last token of its block, so that padding does
    not widen the range of a block's values.

    n is a multiple of `block`; padding has a negative `position` (B, 1|H, n).
    """
    blocks = x.reshape(*x.shape[:2], -1, block, x.shape[3])
    empty = position.reshape(*position.shape[:2], -1, block, 1) < 0
    return torch.where(empty, blocks[:, :, :, -1:], blocks).flatten(2, 3)
