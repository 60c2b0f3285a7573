"""Where the tokens of marked blocks are in a prompt, and which blocks are not worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.blocks.parts import Mark, Refused
from kvkeep.blocks.prefill import Span

SHORTEST = 16
"""Tokens of a block that is worth a segment of its own, at least."""


@dataclass(frozen=True)
class BlockTokens:
    """What became of a block that was marked.

    Args:
        text: of the block.
        span: its tokens; None where it has none of its own.
        refused: why it is not reused; empty if it is.
    """

    text: str
    span: Span | None
    refused: str = ""

    def refuse(self, reason: str) -> BlockTokens:
        """The same, not reused."""
        return self if self.refused else replace(self, refused=reason)


def tokenized(
    tokenizer: Any, text: str, marks: Sequence[Mark | Refused], *, special: bool, shortest: int
) -> tuple[Tensor, list[BlockTokens]]:
    """The tokens of a text, and those of each block.

    The text is encoded once, as a whole, and a block's are those that lie inside of its mark: what
    stands between blocks and the blocks together are the prompt's tokens, whatever a block's text
    would give by itself. A token that spans a block's boundary is left to what stands beside it;
    a block whose boundary is within a word is a bad one.

    Args:
        marks: those inside others behind them; or why one is not reused.
        special: whether the tokenizer adds its special tokens, such as BOS.

    Returns:
        Token ids, int64 (n,), and what became of each mark.
    """
    offsets = bool(marks) and bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=offsets)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if not offsets:
        refused = "the tokenizer does not say which text a token is of"
        return ids, [
            BlockTokens(m.text if isinstance(m, Refused) else text[m.start : m.stop], None, refused)
            for m in marks
        ]
    places = torch.tensor(encoded["offset_mapping"]).reshape(-1, 2)
    taken: list[Mark] = []
    found: list[BlockTokens] = []
    for mark in marks:
        if isinstance(mark, Refused):
            found.append(BlockTokens(mark.text, None, mark.reason))
            continue
        segment = _segment(text, mark, places, shortest)
        if any(one.start <= mark.start and mark.stop <= one.stop for one in taken):
            segment = segment.refuse("it is inside of a block that is reused")
        elif not segment.refused:
            taken.append(mark)
        found.append(segment)
    return ids, found


def _segment(text: str, mark: Mark, places: Tensor, shortest: int) -> BlockTokens:
    """A block's tokens, (start, stop) characters of each token being `places`, (n, 2)."""
    own = text[mark.start : mark.stop]
    if not own:
        return BlockTokens(own, None, "it is empty")
    starts, stops = places.unbind(dim=1)
    real = stops > starts
    inside = (real & (starts >= mark.start) & (stops <= mark.stop)).nonzero().flatten()
    for edge in (mark.start, mark.stop):
        for index in (real & (starts < edge) & (stops > edge)).nonzero().flatten().tolist():
            start, stop = places[index].tolist()
            if text[edge - 1].isalnum() and text[edge].isalnum():
                return BlockTokens(
                    own,
                    None,
                    f"its boundary re-tokenises: one token is of {text[start:stop]!r}, and it is "
                    "within a word of that; put white space between them",
                )
    if len(inside) < shortest:
        return BlockTokens(
            own, None, f"it is too short: {len(inside)} tokens of its own, at least {shortest}"
        )
    return BlockTokens(own, Span(int(inside[0]), int(inside[-1]) + 1))
