"""Reaching: what the queries of a layer see, and which slots later ones cannot reach."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import Segment, View
from kvkeep.errors import UnsupportedError
from kvkeep.layer.history import History, Prompt
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.step import view_of
from kvkeep.planes import Chunks, OwnWindow, Reach
from kvkeep.policy import Policy


class Reaching:
    """The methods of `LayerCache` that depend on what its policy and its own window show."""

    policy: Policy
    window: OwnWindow | None
    record_past: bool
    """Whether the chunks fed may be drafts, of which a crop takes some back."""
    prompt: Prompt
    """What is certain of the text although `record_past` is set."""
    _slots: LayerSlots
    past: History

    @property
    def chunked(self) -> bool:
        """Whether the layer's own window begins at a multiple of its size."""
        return isinstance(self.window, Chunks)

    @property
    def _tentative(self) -> bool:
        """Whether the newest tokens may be taken back."""
        return self.record_past and self.past.columns > self.prompt.columns

    @property
    def reachable(self) -> int:
        """How many of the slots in use the next query can reach; `extend` drops the others."""
        reach = self.policy.reach
        if reach is None or self._tentative:
            return self._slots.length
        if isinstance(self.window, Chunks) and reach == Reach(self.window):
            held = self.window.behind(self.past.newest + 1) - 1
            return min(self._slots.length, held if isinstance(held, int) else int(held.max()))
        return min(self._slots.length, reach.size - 1 + reach.fixed)

    def view_of(
        self,
        segments: tuple[Segment, ...],
        queries: Tensor,
        history: History,
        length: int,
        hides: bool = False,
        until: Tensor | None = None,
    ) -> View:
        """The view of queries over `length` slots, after `history`. `hides`: some are hidden;
        `until`: see `view_of`."""
        return view_of(
            segments,
            queries,
            self.policy,
            self.window,
            length if history.holes is None else None,  # older slots may be held in their place
            history.columns,
            empty=history.pads is not None or self.policy.ragged or hides,
            until=until,
        )

    def _require_no_order(self) -> None:
        """Raise UnsupportedError if what a query sees depends on the order of the tokens."""
        own, reach = self.window, self.policy.reach
        if own is None and reach is None:
            return
        limit = f"policy {self.policy.name}" if own is None else own.words
        raise UnsupportedError(
            f"causal=False, but {limit} drops what lies too far before a query, so not every query "
            "can see all tokens; use a layer without a window, and keep_all or a policy that "
            "scores, such as h2o:1024"
        )
