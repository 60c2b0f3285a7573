"""Storage of a fixed number of slots, allocated once."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from kvkeep.errors import SpecError
from kvkeep.storage.base import require_within
from kvkeep.storage.buffer import Buffer


@final
class Fixed(Buffer):
    """Slots are written in place and never reallocated. With a window policy this is a ring buffer.

    The buffers stay allocated, at the same addresses, until the rows change.
    """

    name: ClassVar[str] = "fixed"
    fixed_addresses: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if not 1 <= capacity < 2**31:
            raise SpecError(
                f"fixed storage of {capacity} slots: give at least 1 and below 2**31, such as "
                "@fixed:4096"
            )
        self.limit = capacity

    def _alike(self) -> Fixed:
        return Fixed(self.limit or 1)

    def _capacity_for(self, slots: int, device: torch.device) -> int:
        require_within(self.limit, slots)
        assert self.limit is not None
        return self.limit

    def reset(self) -> None:
        self._length = 0
