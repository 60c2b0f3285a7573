"""Centring: measures the centre of a layer's keys, and finds it again for each step."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import Centre
from kvkeep.attention.centre import Asked, Turns, measured
from kvkeep.codec import Codec
from kvkeep.layer.history import History
from kvkeep.rotary import Rotary


class Centring:
    """The centres of a layer and of its forks.

    Args:
        key_codec: its `centre` is the number of tokens on which a centre is measured; 0: keys have
            no centre.
        rotary: the model's rotary embedding; None: the model has none.
    """

    def __init__(self, key_codec: Codec, rotary: Rotary | None) -> None:
        self._tokens, self._rotary = key_codec.centre, rotary
        self._turns: Turns | None = None

    def of(self, history: History) -> Centre | None:
        """The centre of a layer's slots; None: no centre."""
        held = history.centre
        return None if held is None else Centre(held, self.turns_for(held, history.columns))

    def of_new(
        self, k: Tensor, position: Tensor, history: History, asked: Asked | None = None
    ) -> Centre | None:
        """The centre for encoding keys (B, H, n, Dk) at `position`, (n,) or (B, n), after
        `history`. If the layer has none yet, it is measured on these keys and the queries `asked`;
        without queries the scales are 1. None: no centre."""
        if not self._tokens:
            return None
        positions, held = history.columns + k.shape[2], history.centre
        if position.device.type == "cpu":
            positions = max(positions, int(position.max()) + 1)
        turns = self.turns_for(k, positions)
        if held is not None:
            return Centre(held, turns)
        return measured(k, position, self._tokens, turns, asked)

    def turns_for(self, like: Tensor, positions: int) -> Turns:
        """The turns for keys of the width and device of `like`, (B, H, ..., Dk), for at least
        `positions` positions."""
        turns = self._turns
        if turns is None or turns.table.device != like.device or not turns.covers(positions):
            turns = self._turns = Turns.of(self._rotary, like.shape[-1], positions, like.device)
        return turns
