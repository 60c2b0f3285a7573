"""Contents: a layer's slots, decoded and in the order of positions."""

from __future__ import annotations

import torch

from kvkeep.attention import Held, View
from kvkeep.layer.centring import Centring
from kvkeep.layer.cursor import Cursor
from kvkeep.policy import Policy


class Contents:
    """Reads a layer's keys and values. Nothing changes."""

    def __init__(self, policy: Policy, cursor: Cursor, centring: Centring) -> None:
        self._policy, self._cursor, self._centring = policy, cursor, centring

    def in_order(self, view: View) -> Held:
        """Keys and values of a view in ascending order of position, for attention functions with
        masks by column. They are copied if `moved`."""
        history = self._cursor.history
        assert history.geometry is not None
        dtype, centre = history.geometry.dtype, self._centring.of(history)
        return view.in_order(dtype, dtype, moved=self.moved, centre=centre)

    @property
    def moved(self) -> bool:
        """Whether slots may be out of the order of positions, now or after this step: after an
        eviction, if the layer holds more than its budget, or if it has a plain tail."""
        slots, history = self._cursor.slots, self._cursor.history
        budget = self._policy.at(history.columns).budget
        late = slots.late and slots.length > 0  # sinks lie behind encoded tokens
        return bool(history.floor) or late or slots.length > (budget or slots.length)

    def held(self) -> Held | None:
        """See `LayerCache.held`."""
        slots, history = self._cursor.slots, self._cursor.history
        if history.geometry is None or not slots.length:
            return None
        newest = torch.zeros(1, dtype=torch.int32, device=history.geometry.device)
        held = self.in_order(View(slots.segments(), newest))
        if held.position.shape[2] < history.columns and self.kept == 1:  # only padding was freed
            held = held.widened(history.columns)
        # Rows may share all slots.
        k, v, position = (x.expand(history.rows, *x.shape[1:]) for x in held[:3])
        if slots.storage.lasting:
            return Held(k, v, position, held.order)
        return Held(k.clone(), v.clone(), position.clone())

    @property
    def kept(self) -> float:
        """Share of the tokens fed that the layer holds, averaged over rows and heads; 1 before the
        first token."""
        seen, position = int(self._cursor.history.seen.sum()), self._cursor.slots.positions()
        return int((position >= 0).sum()) / (seen * position.shape[1]) if seen else 1.0
