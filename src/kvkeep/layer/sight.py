"""Sight: which slots a layer's queries see, and which slots later queries cannot reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvkeep.attention import Held, Segment, View
from kvkeep.errors import UnsupportedError
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.history import History
from kvkeep.planes import Chunks, OwnWindow, Reach, limits
from kvkeep.policy import Policy


class Sight(NamedTuple):
    """The limits on the slots that a layer's queries see.

    Args:
        policy: its reach limits the slots that a query sees.
        window: the layer's own sliding window; None if it has none.
    """

    policy: Policy
    window: OwnWindow | None

    def reachable(self, cursor: Cursor) -> int:
        """Number of slots in use that the next query can reach; `extend` frees all other slots."""
        reach, length = self.policy.reach, cursor.slots.length
        if reach is None or cursor.tentative:
            return length
        if isinstance(self.window, Chunks) and reach == Reach(self.window):
            held = self.window.behind(cursor.history.newest + 1) - 1
            return min(length, held if isinstance(held, int) else int(held.max()))
        return min(length, reach.size - 1 + reach.fixed)

    def after(
        self,
        segments: tuple[Segment, ...],
        queries: Tensor,
        history: History,
        length: int,
        hides: bool = False,
        until: Tensor | None = None,
    ) -> View:
        """The view of queries over `length` slots, after `history`. `hides`: some slots are hidden.
        For the other arguments see `view`."""
        return self.view(
            segments,
            queries,
            length if history.holes is None else None,  # with holes, few slots may span a window
            history.columns,
            empty=history.pads is not None or self.policy.ragged or hides,
            until=until,
        )

    def view(
        self,
        segments: tuple[Segment, ...],
        queries: Tensor,
        length: int | None,
        fed: int,
        *,
        empty: bool,
        until: Tensor | None = None,
    ) -> View:
        """The view that queries attend to.

        Args:
            segments: all slots, the chunk's tokens last.
            queries: positions of the queries, (n,) or (B, n).
            length: slots in use, of the longest row and head, from which follows which limits can
                be left out. None: unknown, so every limit is applied.
            fed: columns fed, including the chunk.
            empty: whether some slots are empty.
            until: the newest position that each query sees, (n,) or (B, n), where it is later than
                the query's own position.
        """
        reach, window, n = self.policy.reach, self.window, queries.shape[-1]
        reaches = limits(reach, window, n, length, fed)
        first: Tensor | None = None
        if isinstance(window, Chunks):
            hidden = window.hides(reach, n, length, fed) or (empty and fed > window)
            first = queries + 1 - window.behind(queries) if hidden else None
        if first is None and until is None:
            return View(segments, queries, empty, reaches)
        last = queries if until is None else torch.maximum(queries, until)
        first = torch.zeros_like(last) if first is None else first.expand_as(last)
        return View(segments, queries, empty, reaches, torch.stack([first, last], dim=-2))

    def require_no_order(self) -> None:
        """Raise UnsupportedError if the order of the tokens limits the slots that a query sees."""
        if self.window is None and self.policy.reach is None:
            return
        limit = f"policy {self.policy.name}" if self.window is None else self.window.words
        raise UnsupportedError(
            f"causal=False, but {limit} drops slots too far before a query, so not every query "
            "can see all tokens; use a layer without a window, and keep_all or a policy that "
            "scores, such as h2o:1024"
        )

    @property
    def own_limit(self) -> str:
        """The layer's own window in words, if that is the policy's reach; otherwise empty."""
        own = self.window is not None and self.policy.reach == Reach(self.window)
        return self.window.words if own and self.window else ""


class Sighted(NamedTuple):
    """The tokens that n new tokens can see, and among which an index chooses (DeepSeek V3.2): for
    each kv head, or once if all heads hold the same tokens.

    `keys`: keys of the S earlier tokens, (1|B, H, S, D); None: there are none. `position`:
    positions of the earlier tokens, then of the new tokens, int32 (1|B, 1|H, S + n). `visible`:
    whether each new token sees each of these tokens, bool (1|B, 1|H, n, S + n).
    """

    keys: Tensor | None
    position: Tensor
    visible: Tensor

    @classmethod
    def of(cls, held: Held | None, queries: Tensor, sight: Sight) -> Self:
        """The tokens that queries at positions `queries`, (n,) or (B, n), can see in a layer that
        holds `held`."""
        queries = queries.reshape(-1, queries.shape[-1])
        position = queries[:, None]
        if held is not None:
            before = held.position
            if before.shape[1] > 1 and bool((before == before[:, :1]).all()):
                before = before[:, :1]
            position = torch.cat([before, position.expand(*before.shape[:2], -1)], dim=2)
        view = sight.view((), queries, None, position.shape[2], empty=True)
        return cls(None if held is None else held.keys, position, view.sees(position))

    @classmethod
    def joined(cls, some: Sequence[Self]) -> Self:
        """The tokens of several sequences of one row each, whose new tokens are concatenated in one
        row."""
        heads = max(one.position.shape[1] for one in some)
        olds, news, seen = [], [], []
        for one in some:
            n = one.visible.shape[2]
            position = one.position.expand(-1, heads, -1)
            visible = one.visible[0].expand(heads, -1, -1)
            olds.append(position[..., :-n])
            news.append(position[..., -n:])
            seen.append((visible[..., :-n], visible[..., -n:]))
        keys = [one.keys for one in some if one.keys is not None]
        return cls(
            torch.cat(keys, dim=2) if keys else None,
            torch.cat([*olds, *news], dim=2),
            torch.cat([_diagonal(x) for x in zip(*seen, strict=True)], dim=2)[None],
        )


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Masks, bool (H, n, S) each, along the diagonal of one mask; False elsewhere."""
    made: list[Tensor] = [torch.block_diag(*x) for x in zip(*blocks, strict=True)]  # type: ignore[no-untyped-call]
    return torch.stack(made).bool()
