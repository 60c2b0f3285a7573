"""BlockEncoded: slots whose tokens are encoded several at a time, each token once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import final

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec, encoded_count, plain_count
from kvkeep.errors import SpecError
from kvkeep.layer.frozen import Run
from kvkeep.layer.history import History
from kvkeep.layer.slots import Codecs, LayerSlots, Span, StepPart
from kvkeep.layer.stats import LayerStats
from kvkeep.layer.undivided import Undivided
from kvkeep.planes import POSITION, Planes, take
from kvkeep.storage import Storage

_BLOCKS = "bulk"  # the name of `blocks` in saved caches


@final
class BlockEncoded(LayerSlots):
    """`blocks`, with one encoded token or block of tokens per slot, and a `tail` of plain tokens:
    the newest tokens and the codecs' sinks. If each slot of `blocks` holds one token, and no row
    has padding, both parts are in the order of positions, so encoded tokens can be cut off too.

    Args:
        codecs: with equal block lengths and equal `together`.
        storage: holds the tail; this object takes ownership. The blocks get an empty copy of it.

    Raises:
        SpecError: the storage is fixed, so it may lack room for a prompt that is not encoded yet;
            or only one storage of this kind can be read at a time.
    """

    def __init__(self, codecs: Codecs, storage: Storage) -> None:
        names = f"{codecs.key.name}/{codecs.value.name}"
        if storage.limited:
            raise SpecError(
                f"codecs {names} encode a prompt after attention, and {storage.name} storage may "
                "have no room for it until then; use @growing"
            )
        if not storage.lasting:
            raise SpecError(
                f"codecs {names} read two storages together, blocks and a tail, but only one "
                f"{storage.name} storage can be read at a time; use int8, or @growing"
            )
        self.blocks = Undivided(codecs, (), storage.empty_copy())
        storage.bound = plain_count(*codecs) + codecs.key.together
        self.tail = Undivided(codecs.unencoded, (), storage)
        self.codecs = self.tail.codecs
        self.block, self._each = codecs.key.together, codecs.key.block
        self._torn = False

    @property
    def storage(self) -> Storage:
        return self.tail.storage

    @property
    def length(self) -> int:
        return self.blocks.length * self._each + self.tail.length - self.hidden

    @property
    def capacity(self) -> int:
        return self.blocks.capacity * self._each + self.tail.capacity

    def stats(self) -> LayerStats:
        one, two = self.blocks.stats(), self.tail.stats()
        return LayerStats(
            self.length,
            self.capacity,
            one.live_bytes + two.live_bytes,
            one.nbytes + two.nbytes,
            one.shared_bytes + two.shared_bytes,
            one.reallocations + two.reallocations,
        )

    @property
    def torn(self) -> bool:
        return self._torn

    def segments(self) -> tuple[Segment, ...]:
        return self.blocks.segments() + self.tail.segments()

    def positions(self) -> Tensor:
        held = [slots.positions() for slots in (self.blocks, self.tail) if slots.length]
        return torch.cat(held, dim=2) if held else self.tail.positions()

    def spans(self) -> tuple[Span, ...]:
        return self.blocks.spans() + self.tail.spans()

    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        self.tail.add(k.to(v.dtype), v, own)  # keys less a centre may be float32

    def evictable(self) -> Planes:
        return self.tail.evictable()

    def keep(self, name: str, plane: Tensor) -> None:
        self.tail.keep(name, plane)

    def evict(self, victims: Tensor) -> None:
        self.tail.evict(victims)

    def step_parts(self) -> tuple[StepPart, ...]:
        before = self.blocks.segments()
        return tuple(x._replace(before=before + x.before) for x in self.tail.step_parts())

    def step_state(self) -> tuple[object, ...]:
        return self.blocks.length, self.blocks.step_state(), self.tail.step_state()

    def fills(self, tokens: int) -> bool:
        return encoded_count(self.tail.length - self.hidden + tokens, *self.blocks.codecs) > 0

    @property
    def waiting(self) -> int:
        return encoded_count(self.tail.length - self.hidden, *self.blocks.codecs)

    def encode_waiting(self, *, hide: bool = False) -> bool:
        planes = self.tail.evictable()
        order = order_of_encoding(planes[POSITION], *self.blocks.codecs)
        first = self.hidden  # hidden slots come first in the order: their position is -1
        oldest = order[:, :, first : first + self.waiting]
        taken = take(planes, oldest)
        position = taken[POSITION]
        held = self.codecs.decode(taken, taken["k"].dtype)
        k, v = (filled(x, position, self._each) for x in held)
        encoded = self.blocks.codecs.encode(k, v)
        if self._each > 1:
            position = position.reshape(*position.shape[:2], -1, self._each)
        encoded[POSITION] = position
        self.blocks.append(encoded)
        end = first + oldest.shape[2]
        if hide:
            self.hide(order[:, :, :end], end)
        elif self._each == 1:
            return self._keep(order[:, :, end:]) and bool((position >= 0).all())
        else:
            self.tail.evict(oldest)
        return False

    def free_hidden(self) -> bool:
        if self._each > 1:
            return super().free_hidden()
        order = self.tail.evictable()[POSITION].argsort(dim=2, stable=True)
        kept, self.hidden = order[:, :, self.hidden :], 0
        return self._keep(kept)

    def _keep(self, index: Tensor) -> bool:
        """Keep only the slots of the tail at `index`, in the order of their positions. Return
        whether all of them hold tokens."""
        planes = self.tail.evictable()
        place = planes[POSITION].gather(2, index)
        kept = take(planes, index.gather(2, place.argsort(dim=2, stable=True)))
        self.tail.reset()
        self.tail.append(kept)
        return bool((place >= 0).all())

    def hide(self, victims: Tensor, count: int) -> None:
        self.tail.thaw()
        super().hide(victims, count)

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        # From the newest on: the tail's tokens except its sinks, then the encoded tokens.
        sinks = max(codec.sinks for codec in self.blocks.codecs)
        encoded = 0
        if self._each == 1:
            encoded = min(self.blocks.length, max(0, fewer - max(0, self.tail.length - sinks)))
        return self.blocks.length - encoded, self.tail.length - (fewer - encoded)

    def cut(self, mark: tuple[int, ...]) -> None:
        self.blocks.cut(mark[:1])
        self.tail.cut(mark[1:])

    def take_rows(self, index: Tensor) -> BlockEncoded:
        self.blocks.take_rows(index)
        self._torn = True
        self.tail.take_rows(index)
        self._torn = False
        return self

    def reset(self) -> BlockEncoded:
        self.blocks.reset()
        self.tail.reset()
        self._torn, self.hidden = False, 0
        return self

    def parts(self) -> dict[str, Planes]:
        blocks, tail = self.blocks.parts(), self.tail.parts()
        return {_BLOCKS: blocks["slots"], **tail} if blocks else tail

    def load(self, parts: Mapping[str, Planes], rows: int) -> BlockEncoded:
        tail = dict(parts)
        blocks = tail.pop(_BLOCKS, None)
        self.blocks.load({} if blocks is None else {"slots": blocks}, rows)
        self.tail.load(tail, rows)
        return self

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        """Replace the contents by plain tokens, which the next step encodes."""
        self.reset()
        self.tail.adopt_frozen(runs, history)

    def freeze(self) -> None:
        """Freeze the blocks; forks copy the tail."""
        self.blocks.freeze()

    def fork(self) -> BlockEncoded:
        other = copy(self)
        other.blocks, other.tail = self.blocks.fork(), self.tail.fork()
        return other


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
