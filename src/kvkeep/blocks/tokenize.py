"""Tokenizes a prompt, and finds the tokens of each marked block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.blocks.parts import Mark, Refused
from kvkeep.blocks.prefill import Span

SHORTEST = 16
"""Fewest tokens of a block to reuse."""


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of a marked block, or why it is not reused.

    Args:
        text: the block's text.
        span: the prompt's tokens that the block covers; None: it was refused before that was known.
        refused: why the block is not reused; empty if it is reused.
    """

    text: str
    span: Span | None
    refused: str = ""

    def refuse(self, reason: str) -> BlockTokens:
        """The same block, refused for a reason. An earlier reason, or an empty `reason`, changes
        nothing."""
        return self if self.refused else replace(self, refused=reason)


def tokenized(
    tokenizer: Any, text: str, marks: Sequence[Mark | Refused], *, special: bool, shortest: int
) -> tuple[Tensor, list[BlockTokens]]:
    """Tokenize a text, and find the tokens of each block.

    The text is tokenized once, as a whole, so the tokens equal the plain prompt's. A block has the
    tokens within its mark, but not tokens across its boundary. A block whose boundary falls within
    a word is refused.

    Args:
        marks: locations of the blocks, nested blocks after their containers; or why a block is
            refused.
        special: whether the tokenizer adds special tokens, such as BOS.
        shortest: fewest tokens of a block to reuse.

    Returns:
        Token ids, int64 (n,), and one `BlockTokens` for each mark.
    """
    with_offsets = bool(marks) and bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=with_offsets)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if not with_offsets:
        refused = "the tokenizer gives no character offsets for tokens"
        return ids, [
            BlockTokens(m.text if isinstance(m, Refused) else text[m.start : m.stop], None, refused)
            for m in marks
        ]
    offsets = torch.tensor(encoded["offset_mapping"]).reshape(-1, 2)
    taken: list[Mark] = []
    blocks: list[BlockTokens] = []
    for mark in marks:
        if isinstance(mark, Refused):
            blocks.append(BlockTokens(mark.text, None, mark.reason))
            continue
        block = _tokens_of(text, mark, offsets, shortest)
        if any(one.start <= mark.start and mark.stop <= one.stop for one in taken):
            block = block.refuse("it is inside a block that is reused")
        elif not block.refused:
            taken.append(mark)
        blocks.append(block)
    return ids, blocks


def _tokens_of(text: str, mark: Mark, offsets: Tensor, shortest: int) -> BlockTokens:
    """The tokens of a block.

    Args:
        offsets: (start, stop) characters of each token, (n, 2).
    """
    own = text[mark.start : mark.stop]
    if not own:
        return BlockTokens(own, None, "it is empty")
    starts, stops = offsets.unbind(dim=1)
    real = stops > starts
    inside = (real & (starts >= mark.start) & (stops <= mark.stop)).nonzero().flatten()
    for edge in (mark.start, mark.stop):
        for index in (real & (starts < edge) & (stops > edge)).nonzero().flatten().tolist():
            start, stop = offsets[index].tolist()
            if text[edge - 1].isalnum() and text[edge].isalnum():
                return BlockTokens(
                    own,
                    None,
                    f"its boundary falls within a word of {text[start:stop]!r}, so that one "
                    "token crosses it; put white space there",
                )
    if len(inside) < shortest:
        why = f"it is too short: it has {len(inside)} tokens, but needs at least {shortest}"
        return BlockTokens(own, None, why)
    return BlockTokens(own, Span(int(inside[0]), int(inside[-1]) + 1))
