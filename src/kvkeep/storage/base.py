"""The contract of a storage, which holds a layer's slots.

A storage knows nothing of tokens, dtypes, codecs or policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvkeep.errors import CapacityError, ShapeError
from kvkeep.planes import (
    Chain,
    Planes,
    marked,
    moves,
    plane_bytes,
    slot_count,
    take,
)
from kvkeep.renamed import Renamed, require_new_names


class Storage(ABC):
    """A run of slots [0, length). Each slot is one entry of every plane of a layer.

    The first append sets the planes' names, dtypes and row and head counts.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    """Whether gradients flow through stored planes."""
    lasting: ClassVar[bool] = True
    """Whether the result of `read` stays valid until this storage changes, even if other storages
    are read in between. Only then can slots be frozen, or read together with another storage."""

    fixed_addresses: ClassVar[bool] = False
    """Whether all `limit` slots are allocated at the first append and keep their addresses until
    the rows change, so that a captured graph may hold the addresses."""

    reserves: ClassVar[bool] = False
    """Whether `reserve` and `adopt` work."""

    limit: int | None = None
    """The most slots this storage can ever hold; None: limited by memory only."""

    bound: int | None = None
    """The most slots that stay after a step; 0: an unknown number, because some are evicted; None:
    all slots. Storage that grows allocates little beyond this bound."""

    reallocations: int = 0
    """Number of times that the slots were copied to a new allocation."""

    torn: bool = False
    """Whether a change failed after changing some of the slots."""

    keep = Renamed("write_plane")
    left = Renamed("remaining")
    another = Renamed("empty_copy")
    behind = Renamed("empty_copy")
    limited = Renamed("limit")

    def __init_subclass__(cls) -> None:
        require_new_names(cls)

    def __init__(self) -> None:
        self._planes: dict[str, Tensor] = {}  # (B, H|1, capacity, ...)

    # -- size -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def length(self) -> int:
        """Slots in use, the same for every row and head."""

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return slot_count(self._planes)

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self.length * plane_bytes(self._planes) // max(1, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including slots not in use."""
        return plane_bytes(self._planes)

    require = Renamed("kvkeep.storage.base.require_within(storage.limit, slots)")

    # -- writing and reading --------------------------------------------------------------

    @abstractmethod
    def append(self, planes: Planes) -> slice:
        """Append copies of n new slots (B, H|1, n, ...) and return their range.

        The input may have any strides. Raises CapacityError, with nothing changed, if `limit` would
        be exceeded.
        """

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        """Like `append`, but calls `write` with views of the `count` new slots, to fill them.

        Returns False, with nothing changed, if this storage does not write in place or has no
        planes yet.
        """
        return False

    @abstractmethod
    def write(self, slots: Tensor, planes: Planes) -> None:
        """Overwrite slots, int64 indices (B|1, H|1, n) below `length`."""

    def write_plane(self, name: str, plane: Tensor) -> None:
        """Overwrite one plane (B, H|1, length, ...) of the slots in use."""
        with torch.inference_mode():  # allows in-place changes of tensors made in any mode
            self.read()[name].copy_(plane)

    @abstractmethod
    def read(self) -> Planes:
        """All slots in use, (B, H|1, length, ...), as views that the next change may overwrite."""

    def resting(self) -> Planes:
        """Like `read`, but on the device that holds the slots between steps (the CPU for `host`
        storage), for copying or saving. Valid until this storage changes."""
        return self.read()

    # -- freeing --------------------------------------------------------------------------

    @abstractmethod
    def evict(self, victims: Tensor) -> None:
        """Free the slots `victims`, int64 (B|1, H|1, c), without repeats; `length` falls by c.

        The order of the remaining slots may change; at most c of them are moved.
        """

    def remaining(self, victims: Tensor, length: int) -> Tensor:
        """The indices of the slots that `evict` leaves of `length` slots, in their new order: int64
        (B|1, H|1, length - c).

        Raises:
            ShapeError: a victim is out of range or repeated.
        """
        count = victims.shape[2]
        named = marked(victims.clamp(0, length - 1), length).sum(dim=2)
        if bool(((victims < 0) | (victims >= length)).any()) or bool((named != count).any()):
            raise ShapeError(
                f"victims {tuple(victims.shape)} of {length} slots: a policy must name {count} "
                f"different slots, 0 to {length - 1}, for each row and head"
            )
        holes, movers = moves(victims, length)
        order = torch.arange(length, device=victims.device).expand(*victims.shape[:2], -1)
        return order.scatter(2, holes, movers)[:, :, : length - count]

    def make_room(self, slots: int) -> bool:
        """Prepare for a step that needs `slots` slots before it evicts some.

        Returns False if the step must keep its new slots elsewhere until it evicts, see
        `append_evicting`; then the slots that stay have room.
        """
        return self.limit is None or slots <= self.limit

    def append_evicting(self, planes: Planes, victims: Tensor) -> None:
        """Like `append(planes)` followed by `evict(victims)`, without room for more slots than
        stay."""
        rows = next(iter(planes.values())).shape[0]
        fed = Chain([self.read(), planes], rows) if self.length else planes
        kept = take(fed, self.remaining(victims, slot_count(fed)))
        self.reset()
        if slot_count(kept):
            self.append(kept)

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Free the slots from `length` on."""

    @abstractmethod
    def reset(self) -> None:
        """Free every slot."""

    @abstractmethod
    def rows(self, index: Tensor) -> None:
        """Make row i a copy of the former row index[i]; int64 (new B,)."""

    # -- other storages -------------------------------------------------------------------

    def empty_copy(self, behind: int = 0) -> Self:
        """A new, empty storage with the same options, for the slots that follow `behind` frozen
        slots: limit and bound are lower by `behind`."""
        fresh = self._alike()
        if self.bound is not None:
            fresh.bound = max(0, self.bound - behind)
        if self.limit is not None:
            fresh.limit = max(1, self.limit - behind)
        return fresh

    def _alike(self) -> Self:
        """A new, empty storage with the same options."""
        return type(self)()

    def share(self, common: dict[str, Any]) -> None:  # noqa: B027
        """Share resources with the other storages of a cache. `common` holds the resources by name
        of storage. By default nothing is shared."""

    # -- steps of the native library and on a device --------------------------------------

    def described(self) -> bytes | None:
        """The addresses and strides of the planes, as KvSlots of native/abi.h; the same object
        until the planes move. The native library may then write allocated slots from `length` on,
        followed by a call of `extend_to`. None: it may not."""
        return None

    def extend_to(self, length: int) -> None:
        """Count the slots up to `length`, which were written in place, as slots in use."""
        raise NotImplementedError(f"{self.name} storage is not written in place")

    def grow_for(self, slots: int) -> None:
        """Allocate as much as an append up to `slots` slots does, in a storage that is not empty
        and is `described`.

        Raises:
            CapacityError: `slots` exceeds `limit`.
            OutOfMemoryError: there is not enough memory; nothing is changed.
        """
        raise NotImplementedError(f"{self.name} storage is not written in place")

    def reserve(self, slots: int) -> None:
        """Allocate at least `slots` slots, in a storage that is not empty. The slots keep their
        addresses until more are needed, some are freed, or the rows change.

        Raises:
            CapacityError: `slots` exceeds `limit`.
            OutOfMemoryError: there is not enough memory; nothing is changed.
        """
        raise NotImplementedError(f"{self.name} storage reserves no slots: it moves them")

    def adopt(self, planes: Planes, length: int) -> None:
        """Use `planes` (B, H|1, capacity, ...), which were read after `reserve`; the first `length`
        slots are in use."""
        raise NotImplementedError(f"{self.name} storage cannot adopt planes: it moves its slots")


def require_within(limit: int | None, slots: int) -> None:
    """Raise CapacityError when `slots` slots exceed `limit`; None: there is no limit."""
    if limit is not None and slots > limit:
        raise CapacityError(
            f"{slots} slots needed, but this cache is fixed at {limit}; use @fixed:{slots} or "
            "more, @growing, or a policy that evicts, such as window"
        )
