"""LayerSlots: the interface to a layer's slots; each layout of slots is a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec
from kvkeep.codec.plain import Plain
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import History
from kvkeep.layer.stats import LayerStats
from kvkeep.planes import POSITION, Chain, Planes, joined, marked, norms, part
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


class LayerSlots(ABC):
    """The slots of one layer: appended, read as segments, and evicted.

    Subclasses:

    - `Undivided`: all rows and heads in one storage, behind frozen runs that forks share.
    - `ByRows`, `ByHead`: rows or heads of different lengths, each part in its own storage.
    - `BlockEncoded`: tokens that are encoded a block at a time, with a plain tail.

    `pack`, `take_rows` and `load` return the object that holds the slots afterwards, maybe
    of another class. Use only the returned object from then on.
    """

    codecs: Codecs
    """The encoding of new tokens."""
    storage: Storage
    """Where new tokens are written."""
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

    plain: int = 0
    """Number of tokens of each row and head that cannot be evicted, because they are in a plain
    tail."""
    late: bool = False
    """Whether new tokens stay plain for a while before they are encoded."""
    torn: bool = False
    """Whether a change failed after changing some of the slots."""

    # -- state ------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens held, including the empty slots of padded rows; of the longest part."""
        return self.storage.length

    @property
    def stats(self) -> LayerStats:
        """All figures at once."""
        held, frozen, shared = self.storage, self.frozen.nbytes, self.frozen.shared_bytes
        live, allocated = frozen + held.live_bytes, frozen + held.nbytes
        capacity = self.frozen.length + held.capacity
        return LayerStats(self.length, capacity, live, allocated, shared, held.reallocations)

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """Segments of all slots, the newest tokens last; nothing is copied."""

    @abstractmethod
    def positions(self, *, newest_last: bool = False) -> Tensor:
        """Positions of all slots, int32 (B, 1|H, S); -1 for an empty slot. Parts with fewer slots
        than the longest are padded with -1 behind their slots; with `newest_last` before them."""

    # -- a step -----------------------------------------------------------------------------

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, own: Planes) -> None:
        """Append tokens: keys, values, and their other planes `own`."""

    @abstractmethod
    def evictable(self) -> Planes:
        """The planes of all slots that can be evicted, as one set; views if one storage holds
        them."""

    @abstractmethod
    def write_plane(self, name: str, plane: Tensor) -> None:
        """Write plane `name` of the slots of `evictable()`, unless it is a view of them."""

    def observed(self) -> Observed:
        """All slots whose policy's planes or positions can change."""
        return Observed((self,))

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
        self.thaw()
        position = self.evictable()[POSITION]
        gone = victims if victims.dtype == torch.bool else marked(victims, position.shape[2])
        self.hidden = count
        with torch.inference_mode():
            self.write_plane(POSITION, position.masked_fill_(gone, -1))

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
    def parts(self) -> dict[str, Planes]:
        """The planes of all slots by name of their part. They may be views; the caller copies."""

    @abstractmethod
    def load(self, parts: Mapping[str, Planes], rows: int) -> LayerSlots:
        """Replace the contents by copies of `parts`, taken from a layer of the same kind; no parts:
        free all slots."""

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


class Observed(NamedTuple):
    """Slots whose policy's planes or positions can change, in the order of the segments."""

    slots: tuple[LayerSlots, ...]

    @property
    def planes(self) -> Planes:
        """Their planes as one set; views if one storage holds them."""
        links = [slots.evictable() for slots in self.slots]
        return links[0] if len(links) == 1 else Chain(links, links[0][POSITION].shape[0])

    def decoded(self, of: Decode, planes: Planes) -> Tensor:
        """Their keys or values, in float32. `planes`: see `planes`."""
        if len(self.slots) == 1:
            return of(self.slots[0].codecs, planes, torch.float32)
        each = [of(slots.codecs, slots.evictable(), torch.float32) for slots in self.slots]
        return torch.cat(each, dim=2)

    def write(self, name: str, plane: Tensor) -> None:
        """Write the changed plane `name` of `planes` back to the slots, if it is a copy."""
        lengths = [slots.length for slots in self.slots]
        pieces = (plane,) if len(lengths) == 1 else torch.split(plane, lengths, dim=2)
        for slots, piece in zip(self.slots, pieces, strict=True):
            slots.write_plane(name, piece)


def on_one_device(planes: Planes) -> dict[str, Tensor]:
    """Move all planes to the device of the position plane: host storage keeps keys and values on
    the host."""
    device = planes[POSITION].device
    return {name: planes[name].to(device) for name in planes}
