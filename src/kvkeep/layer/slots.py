"""LayerSlots: the contract for a layer's slots. Each way of holding slots is a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.stats import LayerStats
from kvkeep.planes import HOLE, POSITION, Planes, joined, marked, norms, part, unsliced
from kvkeep.storage import Storage


class Codecs(NamedTuple):
    """How the keys and values of a layer's slots are encoded."""

    key: Codec
    value: Codec

    def encode(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The planes of keys (B, H, n, Dk) and values (B, H, n, Dv)."""
        return joined(self.key.encode(k), "k") | joined(self.value.encode(v), "v")

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """The encoding error of each token, fp32 (B, H, n): |k - k'| + |v - v'|, with Euclidean
        norms and k', v' decoded."""
        planes = self.encode(k, v)
        total = torch.zeros(k.shape[:3], device=k.device)
        for x, codec, name in ((k, self.key, "k"), (v, self.value, "v")):
            total += norms(x.float() - codec.decode(part(planes, name), torch.float32))
        return total


class Span(NamedTuple):
    """Slots that follow each other and are held alike.

    `tokens` is how many tokens they have room for; `shared` whether they are frozen, so that a
    store or other caches may hold them too; `encoded` whether keys or values are encoded.
    """

    tokens: int
    shared: bool
    encoded: bool


class StepPart(NamedTuple):
    """Slots that take a token in each step by themselves: a storage behind segments that steps do
    not change; of it one row, and one head of the layer, if that is all it holds.

    `place` is the index of the row in the storage.
    """

    codecs: Codecs
    storage: Storage
    before: tuple[Segment, ...] = ()
    row: int | None = None
    head: int | None = None
    place: int = 0

    @property
    def planes(self) -> Planes:
        """The planes of the part, with spare slots: (b, h, capacity, ...)."""
        planes = unsliced(self.storage.read())
        if self.row is None:
            return planes
        return {name: plane.narrow(0, self.place, 1) for name, plane in planes.items()}

    def segments(self) -> tuple[Segment, ...]:
        """The segments that its queries attend to; the last has spare slots."""
        return (*self.before, Segment(self.planes, *self.codecs))

    def of(self, x: Tensor, heads: int) -> Tensor:
        """Select the part's rows and heads of x, (B, heads * group, n, D)."""
        if self.row is not None:
            x = x.narrow(0, self.row, 1)
        return x if self.head is None else x.chunk(heads, dim=1)[self.head]


class LayerSlots(ABC):
    """The slots of one layer: appended, read as segments, and evicted.

    The implementations:

    - `Undivided`: all rows and heads in one storage, behind frozen runs that forks share.
    - `ByRows`, `ByHead`: rows or heads of different lengths, each part in its own storage.
    - `BlockEncoded`: tokens that are encoded a block at a time, with a plain tail.

    `pack`, `take_rows`, `load` and `reset` return the object that holds the slots afterwards: this
    one, or one of another class. In the latter case this object must not be used again.
    """

    codecs: Codecs
    """How new tokens are encoded."""
    limit: int | None = None
    """The most slots it can hold; None: limited by memory only."""
    frozen: FrozenRuns = FrozenRuns()
    """Runs of older slots that forks share."""
    hidden: int = 0
    """How many slots are hidden in each row and head; in all heads together, if they have parts of
    their own."""
    block: int = 1
    """How many tokens are encoded together."""
    single: ClassVar[bool] = False
    """Whether all slots that are neither frozen nor set aside lie in `storage`."""

    # -- state ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """Where new tokens are written."""

    @property
    def length(self) -> int:
        """Tokens held, including the empty slots of padded rows; of the longest part, if there are
        several."""
        return self.storage.length

    @property
    def capacity(self) -> int:
        """Tokens for which slots are allocated."""
        return self.storage.capacity

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, in all planes."""
        return self.storage.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.storage.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of frozen slots; counted once if all rows share them."""
        return self.frozen.shared_bytes

    @property
    def reallocations(self) -> int:
        """How often slots were copied to a new allocation."""
        return self.storage.reallocations

    @property
    def aside(self) -> Planes | None:
        """The planes of a chunk that did not fit, until the policy has evicted; None: no such
        chunk."""
        return None

    @property
    def torn(self) -> bool:
        """Whether a change failed after changing some of the slots."""
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
        """Segments of all slots, the newest tokens last; nothing is copied."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Positions of all slots, int32 (B, 1|H, S); -1 for an empty slot."""

    def spans(self) -> tuple[Span, ...]:
        """How the slots of `positions()` are held, from the first to the last."""
        return tuple(
            Span(segment.slots, index < len(self.frozen.runs), not segment.plain)
            for index, segment in enumerate(self.segments())
        )

    def newest_positions(self, tokens: int) -> Tensor:
        """Positions (B, tokens) of the newest tokens; valid if nothing was evicted since they were
        added."""
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
        """Raise CapacityError when n more tokens exceed `limit`."""
        self.require_room(self.length + n)

    def require_room(self, slots: int) -> None:  # noqa: B027
        """Raise CapacityError when `slots` exceeds the most slots it can hold."""

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """The encoding errors of new tokens; see `Codecs.errors`."""
        return self.codecs.errors(k, v)

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Append new tokens: keys, values, and their other planes `own`."""

    @abstractmethod
    def evictable(self) -> Planes:
        """The planes of all slots that can be evicted, as one set; views if they are in one
        storage."""

    @abstractmethod
    def keep(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of `evictable()` back to the slots, if `evictable()` returned a
        copy."""

    def surplus(self, budget: int) -> int:
        """Slots held beyond a budget per head."""
        return self.length - budget

    @abstractmethod
    def evict(self, victims: Tensor) -> None:
        """Free slots of `evictable()`: int64 indices (B|1, H|1, c), or, where heads have different
        lengths, a bool (B, H, S) that marks them."""

    def hide(self, victims: Tensor, count: int) -> None:
        """Empty the same slots as `evict`, but free none of them, so that `cut` and `keep` can
        restore them. `count` is the number of victims, those included that were hidden before."""
        position = self.evictable()[POSITION]
        gone = victims if victims.dtype == torch.bool else marked(victims, position.shape[2])
        self.hidden = count
        with torch.inference_mode():
            self.keep(POSITION, position.masked_fill_(gone, -1))

    def empty(self, gone: Tensor) -> None:
        """Empty the slots at the positions where `gone`, bool (B, P), is True, and free none."""
        self.thaw()
        position = self.evictable()[POSITION]
        at = position.flatten(1).to(torch.int64)
        found = gone.to(at.device).gather(1, at.clamp(min=0)) & (at >= 0)
        with torch.inference_mode():
            self.keep(POSITION, position.masked_fill_(found.view(position.shape), HOLE))

    def free_hidden(self) -> None:
        """Free the hidden slots."""
        live = self.evictable()[POSITION] >= 0
        order = live.to(torch.uint8).argsort(dim=2, stable=True)
        self.evict(order[:, :, : self.hidden])
        self.hidden = 0

    def fills(self, tokens: int) -> bool:
        """Whether some tokens can be encoded as full blocks once `tokens` more are added."""
        return False

    @property
    def waiting(self) -> int:
        """How many tokens can be encoded as full blocks now."""
        return 0

    def encode_waiting(self, *, hide: bool = False) -> None:
        """Encode the `waiting` oldest plain tokens. They are never encoded again. Their plain slots
        are freed, or hidden."""
        raise NotImplementedError("no tokens wait to be encoded")

    def step_parts(self) -> tuple[StepPart, ...]:
        """The parts that take the token of a step by themselves; none, if steps change slots
        otherwise."""
        return ()

    def step_state(self) -> tuple[object, ...]:
        """Is equal as long as `step_parts` is."""
        return ()

    # -- truncation -------------------------------------------------------------------------

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        """The current lengths, one for each part, to truncate to with `cut`; less `fewer` tokens,
        since which nothing was evicted."""
        return (self.length - fewer,)

    @abstractmethod
    def cut(self, mark: tuple[int, ...]) -> None:
        """Truncate to an earlier `mark`, since which nothing was evicted. An interrupted call can
        be repeated."""

    # -- changes of all slots ---------------------------------------------------------------

    def pack(self) -> LayerSlots | None:
        """Group rows by their number of tokens, and move each group to a storage of its own without
        empty slots. Return None, with nothing changed, if few slots are empty, if there is not
        enough memory, or if slots must not move."""
        return None

    @abstractmethod
    def take_rows(self, index: Tensor) -> LayerSlots:
        """Row i becomes a copy of row index[i], int64 (new B,)."""

    @abstractmethod
    def reset(self) -> LayerSlots:
        """Free all slots."""

    @abstractmethod
    def parts(self) -> dict[str, Planes]:
        """The planes of all slots by the name of their part; the caller copies them."""

    @abstractmethod
    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        """Replace the contents by copies of the `parts` of a layer of the same kind."""

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        """Replace the contents by frozen slots, which other caches may share, encoded by `codecs`.
        New tokens are appended after them. They are copied where slots cannot be shared: on the
        host, and in parts. `history` is the history that the layer will have."""
        raise NotImplementedError("slots of rows with different lengths cannot adopt frozen slots")

    def adopt_planes(self, planes: Planes, length: int, rows: int) -> None:
        """Use these planes, (B, H|1, limit, ...), as fixed storage; the first `length` slots are in
        use."""
        raise NotImplementedError("slots in parts or blocks cannot adopt planes")

    # -- sharing ----------------------------------------------------------------------------

    def freeze(self) -> None:  # noqa: B027
        """Make slots immutable, so that forks share them; new tokens are appended after them. Slots
        that cannot be frozen are copied by forks."""

    @abstractmethod
    def fork(self) -> LayerSlots:
        """A copy; frozen slots are shared."""

    def thaw(self) -> None:  # noqa: B027
        """Replace shared slots that a policy could evict by a copy."""


def on_one_device(planes: Planes) -> dict[str, Tensor]:
    """Move all planes to the device of the position plane: host storage keeps keys and values on
    the host."""
    device = planes[POSITION].device
    return {name: planes[name].to(device) for name in planes}
