"""Cache: the layer caches of a model, changed together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvkeep.borrower import Borrower
from kvkeep.errors import ShapeError, SpecError, StateError
from kvkeep.features import Feature
from kvkeep.layer.hiding import hide, require_hiding
from kvkeep.layer.history import LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import NoStates, RecurrentStates
from kvkeep.layer.stats import LayerStats
from kvkeep.renamed import Renamed
from kvkeep.storage.base import require_within


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache.

    `length` and `capacity` are the maxima over the layers, in slots; bytes and reallocations are
    sums. `seen`: tokens fed, per row; `kept`: the share of them that is held, averaged over layers
    and heads. `shared_bytes`: bytes of frozen slots, which other caches may share;
    `recurrent_bytes`: bytes of recurrent states; both are part of the other byte counts.
    `marked_bytes`: bytes of copies of recurrent states at marks, not included in other counts.
    """

    length: int
    capacity: int
    seen: tuple[int, ...]
    live_bytes: int
    nbytes: int
    shared_bytes: int
    reallocations: int
    kept: float
    layers: tuple[LayerStats, ...]
    recurrent_bytes: int = 0
    marked_bytes: int = 0

    def asdict(self) -> dict[str, Any]:
        """The statistics as a dict for JSON."""
        return asdict(self)


class Snapshot(NamedTuple):
    """A copy of a cache's contents: the kinds and states of its attention layers, `Cache.routed`,
    and the recurrent states by name."""

    kinds: list[str]
    layers: list[LayerState]
    routed: bool | None
    carried: Mapping[str, Tensor]


class Cache:
    """A model's layer caches, for your own forward.

    Each layer's attention is `cache.layers[i].step(q, k, v, scale=...)`.

    Layers may differ in policy, codec, storage, widths and device. Every forward feeds all layers.

    Args:
        layers: the attention layers.
        carried: the states of recurrent layers; None: the model has none. All operations of the
            cache include them. `crop` and `rewind` return them only to points where `mark` was
            called.

    Attributes:
        carried: the recurrent states; false if there are none.
    """

    recurrent = Renamed("Cache.carried, which is never None")
    reallocations = Renamed("Cache.stats().reallocations")
    routed: bool | None = None
    """Whether kvkeep computed the attention of the tokens in the cache; None: unknown."""

    def __init__(
        self, layers: Iterable[LayerCache], carried: RecurrentStates | None = None
    ) -> None:
        self._layers: list[LayerCache] = list(layers)
        self.carried = NoStates() if carried is None else carried
        self.lent: Borrower | None = None  # has exclusive use of the layers
        self._changing = False  # True while layers change; still True after an interrupt
        share_buffers(self.layers)

    @property
    def layers(self) -> list[LayerCache]:
        """The layers, in the model's order.

        Raises:
            StateError: another object is using them.
        """
        if self.lent is not None:
            self.lent.give_back()
        return self._layers

    @layers.setter
    def layers(self, layers: list[LayerCache]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def admit(self, n: int) -> None:
        """Check, before a forward of n tokens, that every layer has room, and that the previous
        forward was not interrupted.

        Raises:
            CapacityError: a layer has no room.
            StateError: the layers were fed different numbers of tokens.
        """
        layers = self.layers
        untouched = n == 1 and all(layer.plan is not None and layer.plan.known for layer in layers)
        if untouched and len({layer.fed for layer in layers}) == 1:
            return
        self.mend()
        _require_alike(layers, "another forward")
        for layer in layers:
            layer.writer.require(n)

    def reset(self) -> None:
        """Remove all tokens."""
        for layer in self.layers:
            layer.reset()
        self.carried.reset()
        self._changing = False

    def mark(self) -> None:
        """Copy the recurrent states, so that `crop` and `rewind` can return to this point. A cache
        without recurrent states needs no marks.

        Raises:
            StateError: a forward is running or was interrupted.
        """
        if self.carried:
            self.mend("mark")
            self.carried.mark()

    def crop(self, tokens: int) -> None:
        """Remove the newest -`tokens` tokens (tokens <= 0) of every row, in every layer.

        Raises:
            RollbackError: `tokens` is positive, or a layer cannot remove them; nothing is changed.
            StateError: an earlier change of all layers was interrupted.
        """
        with turns(self.layers):
            self.mend()
            for layer in self.layers:
                layer.drafts.require_rollback(-tokens)
            self.carried.back_to(self.fed + tokens)
            for layer in self.layers:
                layer.crop(tokens)

    def rewind(self, columns: int) -> None:
        """Return to the state after `columns` columns. Also works after an interrupted forward, in
        which not all layers were fed.

        Raises:
            RollbackError: a layer cannot return to it; nothing is changed.
            StateError: an eviction or a change of rows was interrupted.
        """
        with turns(self.layers):
            self.mend()
            for layer in self.layers:
                layer.drafts.require_rollback(layer.fed - columns)
            self.carried.back_to(columns)
            for layer in self.layers:
                layer.crop(columns - layer.fed)

    @property
    def rollback_limit(self) -> int:
        """The largest number of tokens that `crop` can remove exactly. With recurrent states 0,
        although `crop` can also return to `carried.marks`."""
        if self.carried:
            return 0
        return min((layer.drafts.rollback_limit for layer in self.layers), default=0)

    def why_not(self, feature: Feature) -> str:
        """Why the model of this cache lacks a feature, as a clause about the model; empty if its
        recurrent states do not prevent the feature."""
        return self.carried.lacks.get(feature, "")

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make row i a copy of the former row index[i], as beam search does.

        Raises:
            ShapeError: `index` does not have one existing row for each row; use `select` to change
                the number of rows.
        """
        index = torch.as_tensor(index)
        if self.rows and (index.shape != (self.rows,) or index.dtype == torch.bool):
            raise ShapeError(
                f"reorder of {self.rows} rows by {tuple(index.shape)} indices; give one index for "
                "each row, or use select()"
            )
        self.select(index)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times, copies side by side: 0, 0, 1, 1, ...

        Raises:
            ShapeError: `times` is below 1.
        """
        if not isinstance(times, int) or times < 1:
            raise ShapeError(f"repeat {times} times; give a whole number of at least 1")
        self.select(torch.arange(self.rows).repeat_interleave(times))

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keep only the rows in `index`, in that order; a bool mask (B,) works too.

        Raises:
            ShapeError: an index is not a row, or `index` is empty.
        """
        index, rows = torch.as_tensor(index), self.rows
        if index.dtype == torch.bool:
            if rows and index.shape != (rows,):
                raise ShapeError(
                    f"select from {rows} rows by a mask {tuple(index.shape)}; give one bool "
                    "for each row"
                )
            index = index.nonzero().flatten()
        if index.dim() != 1 or index.is_floating_point() or index.is_complex():
            raise ShapeError(f"row indices {index.tolist()}; give whole numbers (B,)")
        if rows and (not len(index) or index.min() < 0 or index.max() >= rows):
            raise ShapeError(f"rows {index.tolist()} of a cache of {rows} rows; give 0..{rows - 1}")
        with turns(self.layers):
            self.mend()
            self.carried.require(self.fed)
            self._changing = True
            for layer in self.layers:
                layer.take_rows(index)
            self.carried.take_rows(index)
            self._changing = False

    def snapshot(self) -> Snapshot:
        """A copy of the current contents for `restore`, without unused slots.

        Raises:
            StateError: a forward is running.
        """
        self.mend("snapshot")
        kinds = [layer.kind for layer in self.layers]
        layers = [layer.state().copy() for layer in self.layers]
        carried = {name: x.clone() for name, x in self.carried.tensors().items()}
        return Snapshot(kinds, layers, self.routed, carried)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot of this cache, or of a cache with the same specs. A snapshot can be
        restored many times. Fixed storage keeps its addresses.

        Raises:
            SpecError: the snapshot's cache has different policies, codecs or windows, or only one
                of the two has recurrent states.
            CapacityError: fixed storage has no room for the snapshot.
        """
        kinds = [layer.kind for layer in self.layers]
        if kinds != snapshot.kinds:
            raise SpecError(
                f"snapshot of {snapshot.kinds[:1]}, {len(snapshot.kinds)} layers, for a cache of "
                f"{kinds[:1]}, {len(kinds)} layers; restore it to a cache of the same specs"
            )
        fed = any(state.history.columns for state in snapshot.layers)
        if bool(snapshot.carried) != (fed and bool(self.carried)):
            raise SpecError(
                "a snapshot with recurrent states needs a cache of the same model; restore it to a "
                "cache of that model"
            )
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            require_within(layer.slots.limit, state.length)
        with turns(self.layers):
            self._changing = True
            for layer, state in zip(self.layers, snapshot.layers, strict=True):
                layer.restore(state)
            self.carried.restore(snapshot.carried, self.fed)
            self.routed, self._changing = snapshot.routed, False

    def freeze(self) -> Frozen[Self]:
        """The current contents as an immutable cache, which any number of forks can share.

        Nothing is copied: this cache continues as the first fork, and copies the frozen slots only
        when a policy must evict from them. (Heads of different lengths are copied at once.)

        Raises:
            StateError: a forward is running.
        """
        with turns(self.layers):
            self.mend("freeze")
            for layer in self.layers:
                layer.freeze()
            return Frozen(self)

    def __copy__(self) -> Self:
        """A cache in the same state, which shares the frozen slots."""
        layers = [layer.fork() for layer in self.layers]  # first: another object may use them
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _layers=layers)
        other.carried = self.carried.fork()
        share_buffers(other.layers)
        return other

    def mend(self, doing: str = "") -> None:
        """Remove the tokens of an interrupted step; see `Cursor.mend`.

        Args:
            doing: names an operation that is possible only between forwards; empty: none.

        Raises:
            StateError: a change of rows was interrupted; or, with `doing`, a forward is running.
        """
        if self._changing:
            raise StateError(
                "a change of rows was interrupted, so layers have different rows; reset() the "
                "cache and feed the tokens again, or restore() a snapshot"
            )
        for layer in self.layers:
            layer.cursor.mend()
        if doing:
            _require_alike(self.layers, doing)
            self.carried.require(self.fed)

    @property
    def rows(self) -> int:
        """B; 0 before the first token."""
        return len(self.seen)

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far, int64 (B,), padding not counted."""
        return self.layers[0].seen if self.layers else torch.zeros(0, dtype=torch.int64)

    @property
    def fed(self) -> int:
        """Columns fed so far, padding included."""
        if self.lent is not None:
            return self.lent.fed
        return self._layers[0].cursor.history.columns if self._layers else 0

    @property
    def tokens(self) -> Tensor | None:
        """The known token ids of the first columns fed, int64 (B, n); None: not known."""
        return self.layers[0].cursor.history.tokens if self.layers else None

    @property
    def length(self) -> int:
        """Slots in use in the longest layer."""
        return max((layer.length for layer in self.layers), default=0)

    @property
    def capacity(self) -> int:
        """Slots allocated in the largest layer."""
        return max((layer.slots.stats.capacity for layer in self.layers), default=0)

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use, and of the states of recurrent layers."""
        return sum(layer.slots.stats.live_bytes for layer in self.layers) + self.carried.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated; on the CPU, bytes that were never written use no memory."""
        held = sum(layer.slots.stats.nbytes for layer in self.layers)
        return held + self.carried.nbytes + self.carried.marked_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of frozen slots, which other caches may share."""
        return sum(layer.slots.stats.shared_bytes for layer in self.layers)

    def stats(self) -> CacheStats:
        """All figures, in total and per layer."""
        layers = tuple(layer.stats() for layer in self.layers)
        return CacheStats(
            length=self.length,
            capacity=self.capacity,
            seen=tuple(self.seen.tolist()),
            live_bytes=self.live_bytes,
            nbytes=self.nbytes,
            shared_bytes=self.shared_bytes,
            reallocations=sum(layer.reallocations for layer in layers),
            kept=sum(layer.kept for layer in layers) / max(1, len(layers)),
            layers=layers,
            recurrent_bytes=self.carried.nbytes,
            marked_bytes=self.carried.marked_bytes,
        )


def note_tokens(cache: Cache, tokens: Tensor, after: int = 0) -> None:
    """Record the token ids (B, n) fed after the first `after` columns, unless the ids before them
    are unknown. Crops, forks and changes of rows update the record."""
    if not cache.layers or len(tokens) != cache.rows:
        return
    known = cache.tokens
    if (0 if known is None else known.shape[1]) < after:
        return
    fed = tokens[:, : cache.fed - after].to(torch.int64)
    before = [] if known is None else [known[:, :after].to(fed.device)]
    # A copy, because the caller may change the tokens.
    cache.layers[0].cursor.history.tokens = torch.cat([*before, fed], dim=1)


def hide_columns(cache: Cache, shown: Tensor) -> None:
    """Empty the slots of fed columns, such as the columns that `generate` feeds to rows that have
    ended. No later query sees them. The positions of later tokens do not change, so windows reach
    as far back.

    Args:
        shown: bool (B, columns fed), False for the columns to empty.

    Raises:
        ShapeError: `shown` is True for padding or hidden columns; nothing is changed.
        UnsupportedError: the hidden tokens have already influenced which slots a layer's policy
            keeps, or share encoded blocks with other tokens; nothing is changed.
    """
    with turns(cache.layers):
        cache.mend("hide")
        for layer in cache.layers:
            require_hiding(layer, shown)
        cache._changing = True
        for layer in cache.layers:
            hide(layer, shown)
        cache._changing = False


@contextmanager
def turns(layers: Iterable[LayerCache]) -> Iterator[None]:
    """Take every layer's turn: a call from a second thread raises before any layer changes."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.cursor.turn)
        yield


def share_buffers(layers: Iterable[LayerCache]) -> None:
    """Let the layers' storages share buffers that only one storage uses at a time."""
    common: dict[str, Any] = {}
    for layer in layers:
        layer.storage.share(common)


def _require_alike(layers: Iterable[LayerCache], doing: str) -> None:
    """Raise StateError if layers were fed different numbers of tokens."""
    fed = {layer.fed for layer in layers}
    if len(fed) > 1:
        raise StateError(
            f"{doing} while layers have been fed {sorted(fed)} tokens: a forward is running or "
            "was interrupted; wait for it, rewind() to the smallest, or reset() the cache"
        )
    for layer in layers:
        layer.cursor.require_read()


CacheType = TypeVar("CacheType", bound=Cache)


class Frozen(Generic[CacheType]):
    """An immutable cache, from `Cache.freeze`. A fork shares its slots until it must evict from
    them. If all rows of a fork share slots, attention reads these slots once for all rows."""

    def __init__(self, cache: CacheType) -> None:
        self._cache = copy(cache)

    def fork(self, rows: int = 1) -> CacheType:
        """A cache that continues independently from these contents, with each row repeated `rows`
        times.

        Raises:
            ShapeError: `rows` is below 1.
        """
        cache = copy(self._cache)
        if rows != 1:
            cache.repeat(rows)
        return cache

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far, int64 (B,), padding not counted."""
        return self._cache.seen

    def stats(self) -> CacheStats:
        """All figures, in total and per layer."""
        return self._cache.stats()
