"""The contract of a storage: where slots lie. It knows no tokens, dtypes, codecs or policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import CapacityError
from kvkeep.planes import Planes, plane_bytes, slot_count


class Storage(ABC):
    """A growing run of slots [0, length), each a place in every plane of one layer.

    The planes' names, dtypes and row and head counts are those of the first append.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    """Whether gradients flow through what was stored."""
    lasting: ClassVar[bool] = True
    """Whether what was read stays until this storage changes, whatever is read of others: then it
    can be frozen, and attended to together with slots of another storage."""

    fixed_addresses: ClassVar[bool] = False
    """Whether all `limit` slots are allocated at the first append and keep their addresses until
    the rows change: then a captured graph may hold the addresses, and `adopt` works."""

    limit: int | None = None
    """Most slots this storage can ever hold; None: as many as memory allows."""

    bound: int | None = None
    """Most slots that stay after a step, as far as is known: 0 where it is known only that slots
    are evicted. Storage that grows then allocates little beyond what stays. None: all stay."""

    reallocations: int = 0
    """How often slots that were already stored had to be copied to make room."""

    def __init__(self) -> None:
        self._planes: dict[str, Tensor] = {}  # (B, H|1, capacity, ...)

    def require(self, slots: int) -> None:
        """Raise CapacityError when `slots` slots can never fit."""
        if self.limit is not None and slots > self.limit:
            raise CapacityError(
                f"{slots} slots needed, but this cache is fixed at {self.limit}; use "
                f"@fixed:{slots} or more, @growing, or a policy that evicts, such as window"
            )

    @property
    def limited(self) -> bool:
        """Whether there is a `limit`."""
        return self.limit is not None

    @property
    @abstractmethod
    def length(self) -> int:
        """Slots in use, the same for every row and head."""

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return slot_count(self._planes)

    @abstractmethod
    def append(self, planes: Planes) -> slice:
        """Copy n new slots (B, H|1, n, ...) behind the last one; returns where they lie.

        Strided input is read as it is. Raises CapacityError, unchanged, when `limit` is exceeded.
        """

    def append_in_place(self, count: int, write: Callable[[Planes], None]) -> bool:
        """Like `append`, but `write` puts the `count` new tokens into views of their slots. False,
        with nothing changed, where slots are not written in place, or their planes not known yet.
        """
        return False

    @abstractmethod
    def write(self, slots: Tensor, planes: Planes) -> None:
        """Overwrite slots, int64 indices (B|1, H|1, n) below `length`."""

    @abstractmethod
    def read(self) -> Planes:
        """All slots in use: (B, H|1, length, ...); views that the next change may overwrite."""

    def keep(self, name: str, plane: Tensor) -> None:
        """Overwrite one plane (B, H|1, length, ...) of the slots in use."""
        with torch.inference_mode():  # in place, whatever mode the plane was made in
            self.read()[name].copy_(plane)

    def resting(self) -> Planes:
        """Like `read`, but where the slots lie while they are not attended to, on whatever device:
        to be copied or saved. Valid until this storage changes."""
        return self.read()

    @abstractmethod
    def evict(self, victims: Tensor) -> None:
        """Free the slots `victims`, int64 (B|1, H|1, c), no repeats; `length` falls by c.

        At most c slots move, so what survives may change its place.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Free the slots from `length` on."""

    @abstractmethod
    def rows(self, index: Tensor) -> None:
        """Make row i a copy of the former row index[i]; int64 (new B,)."""

    @final
    def another(self) -> Storage:
        """A new, empty storage of the same options and bound."""
        fresh = self._alike()
        fresh.bound = self.bound
        return fresh

    def _alike(self) -> Storage:
        """A new, empty storage of the same options."""
        return type(self)()

    def behind(self, slots: int) -> Storage:
        """A new, empty storage for what follows `slots` slots that lie elsewhere."""
        return self.another()

    def share(self, common: dict[str, Any]) -> None:  # noqa: B027
        """Take part in what the storages of one cache share, kept in `common` by name: by default
        in nothing."""

    def adopt(self, planes: Planes, length: int) -> None:
        """Use these planes, (B, H|1, limit, ...), of which `length` slots are in use.

        Only storage with `fixed_addresses` can.
        """
        raise NotImplementedError(f"{self.name} storage cannot stay in planes it is given")

    @abstractmethod
    def reset(self) -> None:
        """Free every slot."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all rows, heads and planes; 0 before the first append."""
        return plane_bytes(self._planes) // max(1, self.capacity)

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self.length * self.slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated, slots not in use included."""
        return plane_bytes(self._planes)
