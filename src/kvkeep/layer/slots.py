"""LayerSlots: the interface to a layer's slots; each layout of slots is a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec
from kvkeep.codec.plain import Plain
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.stats import LayerStats
from kvkeep.planes import HOLE, POSITION, Planes, joined, marked, narrowed, norms, part, unsliced
from kvkeep.storage import Storage


class Codecs(NamedTuple):
    """The codecs of a layer's keys and values."""

    key: Codec
    value: Codec

    def encode(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Encode keys (B, H, n, Dk) and values (B, H, n, Dv) to planes."""
        return joined(self.key.encode(k), "k") | joined(self.value.encode(v), "v")

    def decode(self, planes: Planes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decode planes to keys (B, H, S, Dk) and values (B, H, S, Dv) in `dtype`."""
        return self.keys(planes, dtype), self.values(planes, dtype)

    def keys(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """The keys of `decode`."""
        return self.key.decode(part(planes, "k"), dtype)

    def values(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        """The values of `decode`."""
        return self.value.decode(part(planes, "k" if self.value.of_keys else "v"), dtype)

    @property
    def unencoded(self) -> Codecs:
        """The codecs of tokens that are not encoded yet, because their block is not full."""
        return Codecs(self.key.waiting(Plain()), self.value.waiting(Plain()))

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """The encoding error of each token, fp32 (B, H, n): |k - k'| + |v - v'|, with Euclidean
        norms and k', v' decoded; |k - k'| if values are elements of keys."""
        found = self.decode(self.encode(k, v), torch.float32)
        error = norms(k.float() - found[0])
        return error if self.value.of_keys else error + norms(v.float() - found[1])


Decode = Callable[[Codecs, Planes, torch.dtype], Tensor]
"""`Codecs.keys` or `Codecs.values`."""


class Span(NamedTuple):
    """Adjacent slots in the same state.

    `tokens`: number of tokens for which the slots have room; `shared`: the slots are frozen, so a
    store or other caches may hold them too; `encoded`: keys or values are encoded.
    """

    tokens: int
    shared: bool
    encoded: bool


class StepPart(NamedTuple):
    """A part of a layer's slots to which each step appends tokens: a storage, or one row or head of
    it, after the segments `before`, which steps do not change.

    `row`, `head`: index of the part's only row or head; None: all. `place`: the row's index in the
    storage; the storage may hold all heads. `behind`: the slots, the last of `before`, to which
    this part's tokens move, if the part is a plain tail.
    """

    codecs: Codecs
    storage: Storage
    before: tuple[Segment, ...] = ()
    row: int | None = None
    head: int | None = None
    place: int = 0
    behind: StepPart | None = None

    @property
    def planes(self) -> Planes:
        """The planes of the part, with spare slots: (b, h, capacity, ...)."""
        planes = unsliced(self.storage.read())
        if self.row is not None:
            planes = {name: plane.narrow(0, self.place, 1) for name, plane in planes.items()}
        return planes if self.head is None else narrowed(planes, None, self.head)

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

    Subclasses:

    - `Undivided`: all rows and heads in one storage, behind frozen runs that forks share.
    - `ByRows`, `ByHead`: rows or heads of different lengths, each part in its own storage.
    - `BlockEncoded`: tokens that are encoded a block at a time, with a plain tail.

    `pack`, `take_rows`, `load` and `reset` return the object that holds the slots afterwards, maybe
    of another class. Use only the returned object from then on.
    """

    codecs: Codecs
    """The encoding of new tokens."""
    limit: int | None = None
    """Most slots; None: limited by memory only."""
    frozen: FrozenRuns = FrozenRuns()
    """Runs of older slots that forks share."""
    hidden: int = 0
    """Number of hidden slots in each row and head; if heads have their own parts, summed over
    heads."""

    @property
    def hides(self) -> tuple[int, ...]:
        """`hidden`, one number for each of the parts that hide slots separately. Can be set."""
        return (self.hidden,)

    @hides.setter
    def hides(self, counts: tuple[int, ...]) -> None:
        (self.hidden,) = counts

    block: int = 1
    """How many tokens are encoded together."""
    single: ClassVar[bool] = False
    """Whether all slots lie in `storage`, except frozen slots and a chunk set aside."""

    # -- state ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """Where new tokens are written."""

    @property
    def length(self) -> int:
        """Tokens held, including the empty slots of padded rows; of the longest part."""
        return self.storage.length

    @property
    def capacity(self) -> int:
        """Number of tokens for which slots are allocated."""
        return self.storage.capacity

    @property
    def plain(self) -> int:
        """Number of tokens of each row and head that cannot be evicted, because they are in a plain
        tail."""
        return 0

    @property
    def aside(self) -> Planes | None:
        """The planes of a chunk that did not fit and is set aside until the policy has evicted;
        None: no chunk is set aside."""
        return None

    @property
    def torn(self) -> bool:
        """Whether a change failed after changing some of the slots."""
        return False

    def stats(self) -> LayerStats:
        """All figures at once."""
        held, frozen, shared = self.storage, self.frozen.nbytes, self.frozen.shared_bytes
        live, allocated = frozen + held.live_bytes, frozen + held.nbytes
        return LayerStats(self.length, self.capacity, live, allocated, shared, held.reallocations)

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """Segments of all slots, the newest tokens last; nothing is copied."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Positions of all slots, int32 (B, 1|H, S); -1 for an empty slot."""

    def spans(self) -> tuple[Span, ...]:
        """The slots of `positions()`, in order, as spans."""
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
        """Positions (B, 1|H, count) of the newest slots; fewer columns if fewer slots are held."""
        positions = self.positions()
        return positions[:, :, max(0, positions.shape[2] - count) :]

    # -- a step -----------------------------------------------------------------------------

    def require(self, n: int) -> None:
        """Raise CapacityError if n more tokens exceed `limit`."""
        self.require_room(self.length + n)

    def require_room(self, slots: int) -> None:  # noqa: B027
        """Raise CapacityError if `slots` exceeds the storage's limit."""

    def errors(self, k: Tensor, v: Tensor) -> Tensor:
        """The encoding errors of new tokens; see `Codecs.errors`."""
        return self.codecs.errors(k, v)

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Append tokens: keys, values, and their other planes `own`."""

    @abstractmethod
    def evictable(self) -> Planes:
        """The planes of all slots that can be evicted, as one set; views if one storage holds
        them."""

    def observed(self) -> Planes:
        """The planes of all slots whose policy's planes or positions can change, as one set, in the
        order of the segments; views if one storage holds them."""
        return self.evictable()

    def decoded(self, of: Decode, planes: Planes) -> Tensor:
        """Keys or values of the slots of `evictable()`, in float32."""
        return of(self.codecs, planes, torch.float32)

    def observed_decoded(self, of: Decode, planes: Planes) -> Tensor:
        """Keys or values of the slots of `observed()`, in float32."""
        return self.decoded(of, planes)

    @abstractmethod
    def keep(self, name: str, plane: Tensor) -> None:
        """Write the changed plane `name` of `observed()` back to the slots, if it is a copy."""

    def surplus(self, budget: int) -> int:
        """Number of slots over a budget per head."""
        return self.length - budget

    @abstractmethod
    def evict(self, victims: Tensor) -> None:
        """Free slots of `evictable()`: int64 indices (B|1, H|1, c), or, where heads have different
        lengths, a bool (B, H, S) that marks them."""

    def hide(self, victims: Tensor, count: int) -> None:
        """Empty the slots that `evict` would free but free none, so that `cut` and `keep` can
        restore them. `count`: number of victims, including slots already hidden."""
        position = self.evictable()[POSITION]
        gone = victims if victims.dtype == torch.bool else marked(victims, position.shape[2])
        self.hidden = count
        with torch.inference_mode():
            self.keep(POSITION, position.masked_fill_(gone, -1))

    def empty(self, gone: Tensor) -> None:
        """Empty the slots at each position p where `gone[:, p]` is True, and free none. `gone`:
        bool (B, P)."""
        self.thaw()
        position = self.evictable()[POSITION]
        at = position.flatten(1).to(torch.int64)
        goes = gone.to(at.device).gather(1, at.clamp(min=0)) & (at >= 0)
        with torch.inference_mode():
            self.keep(POSITION, position.masked_fill_(goes.view(position.shape), HOLE))

    def free(self, gone: Tensor) -> None:
        """Free the empty slots, and the slots at each position p where `gone[:, :, p]` is True.
        `gone`: bool (B, H, P)."""
        raise NotImplementedError("heads of equal lengths free equally many slots")

    def free_hidden(self) -> bool:
        """Free the hidden slots. Return whether `cut` can still remove any number of the newest
        tokens."""
        live = self.evictable()[POSITION] >= 0
        order = live.to(torch.uint8).argsort(dim=2, stable=True)
        self.evict(order[:, :, : self.hidden])
        self.hidden = 0
        return False

    def waiting(self, budget: int | None, more: int = 0) -> int:
        """Number of plain tokens to encode under a budget per head, once `more` were added."""
        return 0

    def encode_waiting(self, count: int, *, hide: bool = False) -> bool:
        """Encode the `count` oldest plain tokens, then free their plain slots, or hide them.
        Return whether `cut` can still remove any number of the newest tokens."""
        raise NotImplementedError("no tokens wait to be encoded")

    def step_parts(self) -> tuple[StepPart, ...]:
        """The parts to which a step appends tokens; empty if a step cannot be described so."""
        return ()

    def step_state(self) -> tuple[object, ...]:
        """A key that stays equal as long as `step_parts` does."""
        return ()

    # -- truncation -------------------------------------------------------------------------

    def mark(self, fewer: int = 0) -> tuple[int, ...]:
        """The current lengths, one for each part, as an argument of `cut`. With `fewer`: the
        lengths before the newest `fewer` tokens, if nothing was evicted since."""
        return (self.length - fewer,)

    @abstractmethod
    def cut(self, mark: tuple[int, ...]) -> None:
        """Truncate to an earlier `mark`. Nothing may have been evicted since. Can be called again
        after an interrupt."""

    # -- changes of all slots ---------------------------------------------------------------

    def pack(self) -> LayerSlots | None:
        """Group rows by their number of tokens, and move each group to its own storage without
        empty slots. Return None, with nothing changed, if few slots are empty, memory is short, or
        slots must not move."""
        return None

    @abstractmethod
    def take_rows(self, index: Tensor) -> LayerSlots:
        """Row i becomes a copy of row index[i], int64 (new B,)."""

    @abstractmethod
    def reset(self) -> LayerSlots:
        """Free all slots."""

    @abstractmethod
    def parts(self) -> dict[str, Planes]:
        """The planes of all slots by name of their part. They may be views; the caller copies."""

    @abstractmethod
    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        """Replace the contents by copies of `parts`, taken from a layer of the same kind."""

    def adopt_frozen(self, runs: Sequence[Run], history: History) -> None:
        """Replace the contents by frozen slots, encoded by `codecs`, which other caches may share.

        New tokens are appended after them. Slots on the host and slots in parts cannot be shared,
        so they are copied. `history`: the layer's history from now on.
        """
        raise NotImplementedError("slots of rows with different lengths cannot adopt frozen slots")

    def adopt_planes(self, planes: Planes, length: int, rows: int) -> None:
        """Use `planes`, (B, H|1, limit, ...), as fixed storage; the first `length` slots are in
        use."""
        raise NotImplementedError("slots in parts or blocks cannot adopt planes")

    # -- sharing ----------------------------------------------------------------------------

    def freeze(self) -> None:  # noqa: B027
        """Make slots immutable, so that forks share them; new tokens are appended after them. A
        fork copies slots that cannot be frozen."""

    @abstractmethod
    def fork(self) -> LayerSlots:
        """A copy; frozen slots are shared."""

    def thaw(self) -> None:  # noqa: B027
        """Replace shared slots by copies if a policy could evict them."""


def on_one_device(planes: Planes) -> dict[str, Tensor]:
    """Move all planes to the device of the position plane: host storage keeps keys and values on
    the host."""
    device = planes[POSITION].device
    return {name: planes[name].to(device) for name in planes}
