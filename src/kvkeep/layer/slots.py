"""The contract of what a layer holds: each way of holding slots is a class of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.stats import LayerStats
from kvkeep.planes import POSITION, Planes, joined, norms, part
from kvkeep.storage import Storage


class Codecs(NamedTuple):
    """How the keys and values of a layer's slots are encoded."""

    key: Codec
    value: Codec

    def encode(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The planes of keys (B, H, n, Dk) and values (B, H, n, Dv)."""
        return joined(self.key.encode(k), "k") | joined(self.value.encode(v), "v")

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """How much encoding changes each token, fp32 (B, H, n): |k - k'| + |v - v'|, Euclidean
        norms."""
        planes = self.encode(k, v)
        total = torch.zeros(k.shape[:3], device=k.device)
        for x, codec, name in ((k, self.key, "k"), (v, self.value, "v")):
            total += norms(x.float() - codec.decode(part(planes, name), torch.float32))
        return total


class LayerSlots(ABC):
    """The slots of one layer: written behind each other, read as segments, evicted by a policy.

    The ways of holding them:

    - `Undivided`: all rows and heads in one storage, behind frozen runs that forks share.
    - `ByRows`, `ByHead`: rows or heads of different lengths, in storages of their own.
    - `BlockEncoded`: tokens that are encoded a block at a time, with a plain tail.

    `pack`, `take_rows`, `load` and `reset` return what holds the slots from then on: this object,
    or one of another class. Then this one must not be used again.
    """

    codecs: Codecs
    """How new tokens are encoded."""
    limit: int | None = None
    """Most slots that can ever be held; None: as many as memory allows."""
    frozen: FrozenRuns = FrozenRuns()
    """Runs of older slots that forks share."""

    # -- what is held -----------------------------------------------------------------------

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """Where new tokens are written."""

    @property
    def length(self) -> int:
        """Tokens held, the empty slots of a padded row included; those of the longest part."""
        return self.storage.length

    @property
    def capacity(self) -> int:
        """Tokens that fit what is allocated."""
        return self.storage.capacity

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, every plane included."""
        return self.storage.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.storage.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of frozen slots; counted once, however many rows share them."""
        return self.frozen.shared_bytes

    @property
    def reallocations(self) -> int:
        """How often slots were copied to make room."""
        return self.storage.reallocations

    @property
    def aside(self) -> Planes | None:
        """A chunk that did not fit and waits until the policy has evicted; None: there is none."""
        return None

    @property
    def torn(self) -> bool:
        """Whether a change failed after some of the slots were changed."""
        return False

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

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """Everything held, the newest tokens last; nothing is copied."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Positions of everything held, int32 (B, 1|H, S); -1 where a slot is empty."""

    def newest_positions(self, tokens: int) -> Tensor:
        """Positions (B, tokens) of the newest tokens, if nothing was evicted after them."""
        return self._newest(tokens)[:, 0]

    def ends_with_tokens(self, count: int) -> bool:
        """Whether the newest `count` slots of every row and head hold tokens."""
        newest = self._newest(count)
        return newest.shape[2] == count and bool((newest >= 0).all())

    def _newest(self, count: int) -> Tensor:
        """Positions (B, 1|H, count) of the newest slots; fewer, if fewer are held."""
        positions = self.positions()
        return positions[:, :, max(0, positions.shape[2] - count) :]

    # -- a step -----------------------------------------------------------------------------

    def require(self, n: int) -> None:
        """Raise CapacityError when n more tokens can never fit."""
        self.require_room(self.length + n)

    def require_room(self, slots: int) -> None:  # noqa: B027
        """Raise CapacityError when so many slots can never be held."""

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """How much encoding changes new tokens, see `Codecs.errors`."""
        return self.codecs.errors(k, v)

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Write new tokens behind all others, with the planes `own` beside keys and values."""

    @abstractmethod
    def evictable(self) -> Planes:
        """All slots that can be evicted, as one set; views if they lie in one place."""

    @abstractmethod
    def keep(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of `evictable()` back to the slots, if that was a copy."""

    def surplus(self, budget: int) -> int:
        """Slots held beyond a budget per head."""
        return self.length - budget

    @abstractmethod
    def evict(self, victims: Tensor) -> None:
        """Free slots of `evictable()`: int64 indices (B|1, H|1, c), or, where heads have different
        lengths, a bool (B, H, S) that marks them."""

    @property
    def waiting(self) -> int:
        """Tokens that could be encoded together now."""
        return 0

    def encode_waiting(self) -> None:
        """Encode the waiting tokens, once and for good."""
        raise NotImplementedError("no tokens wait to be encoded")

    # -- taking back ------------------------------------------------------------------------

    def mark(self) -> tuple[int, ...]:
        """How much is held, for `cut`: one length for each part."""
        return (self.length,)

    @abstractmethod
    def cut(self, mark: tuple[int, ...]) -> None:
        """Truncate to a former `mark`; nothing was evicted since. An interrupted call may be
        repeated."""

    # -- changes of everything --------------------------------------------------------------

    def pack(self) -> LayerSlots | None:
        """Move rows of very different numbers of tokens to storages of their own, without their
        empty slots. None, with nothing changed, if few slots are empty, if there is no memory for
        it, or if slots cannot move."""
        return None

    @abstractmethod
    def take_rows(self, index: Tensor) -> LayerSlots:
        """Make row i a copy of the former row index[i], int64 (new B,)."""

    @abstractmethod
    def reset(self) -> LayerSlots:
        """Free every slot."""

    @abstractmethod
    def parts(self) -> dict[str, Planes]:
        """Everything held, by where it lies: planes to be copied."""

    @abstractmethod
    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        """Hold copies of the `parts` of a layer like this one, in place of what is held."""

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        """Hold frozen slots, which others may hold too, in place of what is held; new tokens are
        written behind them. `history` is of the layer they come from."""
        raise NotImplementedError("slots in parts or blocks cannot follow frozen ones of others")

    def adopt_planes(self, planes: Planes, length: int, rows: int) -> None:
        """Use these planes, (B, H|1, limit, ...), as fixed storage; `length` slots are in use."""
        raise NotImplementedError("slots in parts or blocks cannot stay in planes they are given")

    # -- sharing ----------------------------------------------------------------------------

    def freeze(self) -> None:  # noqa: B027
        """Make what is held immutable, so that forks share it; new tokens go behind it. What stays
        as it is, forks copy."""

    @abstractmethod
    def fork(self) -> LayerSlots:
        """The same slots; frozen ones are shared, others copied."""

    def thaw(self) -> None:  # noqa: B027
        """Replace shared slots that could be evicted by a copy."""


def on_one_device(planes: Planes) -> dict[str, Tensor]:
    """Planes on the device of their positions: keys and values may have rested on another."""
    device = planes[POSITION].device
    return {name: planes[name].to(device) for name in planes}
