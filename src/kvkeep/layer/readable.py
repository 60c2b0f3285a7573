"""Readable: decodes a layer's keys and values and sorts them by position."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Held, View
from kvkeep.layer.history import History
from kvkeep.layer.slots import LayerSlots
from kvkeep.policy import Policy


class Readable:
    """The methods of `LayerCache` that return keys and values."""

    policy: Policy
    _slots: LayerSlots
    past: History

    def in_order(self, view: View) -> Held:
        """Keys and values of a view in the order of their positions, for attention that masks by
        column. They are copied if `moved`."""
        assert self.past.geometry is not None
        dtype = self.past.geometry.dtype
        return view.in_order(dtype, dtype, moved=self.moved)

    @property
    def moved(self) -> bool:
        """Whether the order of slots may differ from that of positions, or is about to: after an
        eviction, or when the layer holds more than its budget, or tokens to encode as a block."""
        slots, policy = self._slots, self.policy.at(self.past.columns)
        over = slots.length > (policy.budget or slots.length)
        return bool(self.past.floor) or over or bool(slots.waiting)

    @property
    def kept(self) -> float:
        """The share of the tokens fed that is held, on average over rows and heads; 1 before the
        first token."""
        seen, position = int(self.past.seen.sum()), self._slots.positions()
        return int((position >= 0).sum()) / (seen * position.shape[1]) if seen else 1.0

    def held(self) -> Held | None:
        """The decoded keys and values and their positions, the oldest first; None if no slot is
        held. As long as no token was evicted, there is a column for each column that was fed:
        freed slots of padding, and those that shorter heads lack, are empty slots in front.

        Valid until the next change. If nothing had to be decoded or moved, these are views of the
        slots: do not write to them.
        """
        if self.past.geometry is None or not self._slots.length:
            return None
        newest = torch.zeros(1, dtype=torch.int32, device=self.past.geometry.device)
        held = self.in_order(View(self._slots.segments(), newest))
        columns = self.past.columns
        if held.position.shape[2] < columns and self.kept == 1:  # only padding was freed
            held = held.widened(columns)
        return held if self._slots.storage.lasting else Held(*(x.clone() for x in held[:3]))

    @property
    def keys(self) -> Tensor | None:
        """Keys of `held`, (B, H, S, Dk); transformers uses this name."""
        held = self.held()
        return None if held is None else held.keys

    @property
    def values(self) -> Tensor | None:
        """Values of `held`, (B, H, S, Dv)."""
        held = self.held()
        return None if held is None else held.values
