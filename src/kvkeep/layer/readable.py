"""What a layer holds, decoded and in order, for those who read it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Held, View
from kvkeep.layer.history import History
from kvkeep.layer.slots import LayerSlots
from kvkeep.policy import Policy


class Readable:
    """The part of `LayerCache` that shows keys and values."""

    policy: Policy
    _slots: LayerSlots
    _history: History

    def in_order(self, view: View) -> Held:
        """Keys and values of a view in the order of their positions, for attention that masks by
        column. A copy once something was evicted or will be."""
        assert self._history.geometry is not None
        dtype = self._history.geometry.dtype
        return view.in_order(dtype, dtype, moved=self.moved)

    @property
    def moved(self) -> bool:
        """Whether slots may lie in another order than that of their positions."""
        length = self._slots.length
        return bool(self._history.floor) or length > (self.policy.budget or length)

    def held(self) -> Held | None:
        """The keys and values that are held, decoded, the oldest first, and their positions; None
        before the first token. Heads of different lengths are padded by empty slots in front.

        Valid until the next change; where nothing had to be decoded or moved they are the slots
        themselves: do not write to them.
        """
        if self._history.geometry is None:
            return None
        newest = torch.zeros(1, dtype=torch.int32, device=self._history.geometry.device)
        held = self.in_order(View(self._slots.segments(), newest))
        return held if self._slots.storage.lasting else Held(*(x.clone() for x in held[:3]))

    @property
    def keys(self) -> Tensor | None:
        """Keys of `held`, (B, H, S, Dk), by the name that transformers has for them."""
        held = self.held()
        return None if held is None else held.keys

    @property
    def values(self) -> Tensor | None:
        """Values of `held`, (B, H, S, Dv)."""
        held = self.held()
        return None if held is None else held.values
