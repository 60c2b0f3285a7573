"""Hiding: the part of `LayerCache` that empties the slots of columns which a later mask hides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kvkeep.codec import Codec
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.layer.history import History
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.turn import Turn
from kvkeep.planes import HOLE
from kvkeep.policy import Policy


class Hiding(ABC):
    """The part of `LayerCache` that empties the slots of columns that were fed as tokens."""

    policy: Policy
    key_codec: Codec
    turn: Turn
    _slots: LayerSlots
    past: History
    _settles_alone: bool

    def require_hiding(self, shown: Tensor) -> Tensor:
        """The columns that `hide` would empty, bool (B, columns).

        Args:
            shown: which columns hold tokens that later queries may see, bool (B, columns).

        Raises:
            ShapeError: some of them were padding, or that is not known.
            UnsupportedError: the layer has decided by these tokens what it keeps, or encoded them
                together with others.
        """
        kinds = self.past.columns_as()
        tokens = shown.new_empty(0) if kinds is None else kinds == 0
        shown = shown.to(tokens.device)
        if tokens.shape != shown.shape or bool((shown & ~tokens).any()):
            raise ShapeError(
                f"the attention mask shows {shown.sum(dim=1).tolist()} tokens in the "
                f"{shown.shape[1]} columns before this call, which differ in number or place from "
                f"the {self.past.seen.tolist()} that the cache was fed; a mask may hide "
                "columns, but show none that were hidden: reset() the cache and feed the whole text"
            )
        gone = tokens & ~shown
        why = ""
        if not self._settles_alone or self.policy.ragged:
            why = f"policy {self.policy.name} has decided by them what it keeps"
        elif self.key_codec.block > 1:
            why = f"codec {self.key_codec.name} has encoded them together with others"
        if why and bool(gone.any()):
            raise UnsupportedError(
                f"the attention mask hides {int(gone.sum())} of the columns that were fed as "
                f"tokens, but {why}; use keep_all or a window, or reset() the cache and feed the "
                "whole text"
            )
        return gone

    def hide(self, shown: Tensor) -> None:
        """Empty the slots of the columns where `shown`, bool (B, columns), is False. Later tokens
        have the positions that they would have had; what was evicted does not come back. See
        `require_hiding`."""
        gone = self.require_hiding(shown)
        if not bool(gone.any()):
            return
        self._accept()
        kinds = self.past.columns_as()
        assert kinds is not None
        place = (kinds != -1).cumsum(dim=1) - 1
        at = torch.zeros_like(gone).scatter_(1, place.clamp(min=0), gone)
        with self.turn, self._moved():
            self._slots.empty(at)
            self.past.hide(kinds.masked_fill(gone, HOLE))
            self._forget_plan()

    # -- what LayerCache does ---------------------------------------------------------------

    @abstractmethod
    def _accept(self) -> None:
        """Make the tokens certain that could be taken back."""

    @abstractmethod
    def _moved(self) -> AbstractContextManager[None]:
        """Mark slots as being moved."""

    @abstractmethod
    def _forget_plan(self) -> None:
        """Forget the plan of the next step."""
