"""Grammars: restrict an answer's tokens so that its text follows a grammar.

llguidance compiles JSON schemas, regular expressions and Lark or GBNF grammars within its own
limits, and computes after each token which tokens may follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from kvkeep.extras import needed_by
from kvkeep.generate import Processor
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.structures import OneOf, Perhaps, Piece, StructureKind

with needed_by("structured output", "structured"):
    from llguidance import LLMatcher, LLTokenizer, grammar_from
    from llguidance.hf import from_tokenizer

_JSON: Any = {"whitespace_flexible": False}
"""JSON on one line: some models would otherwise write white space without end."""

_KEPT = 64  # number of compiled grammars in the cache
_BITS = torch.arange(8, dtype=torch.uint8)


@final
class Grammars:
    """Makes logits processors that enforce grammars.

    Args:
        tokenizer: a fast tokenizer.
        vocabulary: the model's vocabulary size.
        ends: ids of the tokens that end an answer.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        size = max(vocabulary, len(tokenizer))
        self._tokenizer: LLTokenizer = from_tokenizer(
            tokenizer, n_vocab=size, eos_token=sorted(ends) or None
        )
        self._matcher = lru_cache(_KEPT)(self._compiled)
        self._special = {
            added.content: token
            for token, added in tokenizer.added_tokens_decoder.items()
            if added.special
        }

    def following(
        self, kind: StructureKind, grammar: str, field: str, *, after: str = ""
    ) -> Callable[[], Processor]:
        """Compile a grammar; return a function that makes a logits processor for each answer.

        Args:
            kind: the grammar's kind, as `llguidance.grammar_from` names it.
            field: the request's field with the grammar.
            after: the mark that ends the reasoning before the grammar; empty: no reasoning.

        Raises:
            RequestError: the grammar is not valid.
        """
        matcher = self._matcher(kind, grammar, field, after)
        return lambda: _Following(matcher.deep_copy(), field)

    def _compiled(self, kind: StructureKind, grammar: str, field: str, after: str) -> LLMatcher:
        try:
            if kind == "json_schema":
                made = LLMatcher.grammar_from_json_schema(grammar, overrides=_JSON)
            else:
                made = grammar_from(kind, grammar)
            if after:
                made = self._after(after, made)
            matcher = LLMatcher(self._tokenizer, made, log_level=0)
            matcher.compute_bitmask()  # finds grammars that are too complex
            wrong = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise _unfollowed(field, wrong)
        return matcher

    def _after(self, mark: str, grammar: str) -> str:
        """A grammar that starts after a mark."""
        own = json.loads(grammar)["grammars"] if grammar.startswith("{") else None
        body, *others = own or [{"lark_grammar": grammar}]
        if mark in self._special:
            head = f"start: BEFORE {self.text(mark)} @body\nBEFORE: /(.|\\n)*/"
        else:
            head = f"start: before @body\nbefore[lazy]: /(.|\\n)*/ {self.text(mark)}"
        return json.dumps({"grammars": [{"lark_grammar": head}, body | {"name": "body"}, *others]})

    def one_of(self, ways: Sequence[Sequence[Piece]]) -> str:
        """A Lark grammar: one of several sequences of pieces."""
        rules: list[str] = []

        def written(piece: Piece) -> str:
            if isinstance(piece, str):
                return self.text(piece)
            if isinstance(piece, dict):
                return f"%json {json.dumps(piece | {'x-guidance': _JSON})}"
            if isinstance(piece, OneOf):
                return f"({' | '.join(map(json.dumps, piece.texts))})"
            if isinstance(piece, Perhaps):
                return f"({' '.join(map(written, piece.pieces))})?"
            name, most = f"until{len(rules)}", "" if piece.most is None else piece.most
            text = f"/(.|\\n){{{piece.least},{most}}}/"
            rules.append(f"{name}[lazy]: {text} {json.dumps(piece.end)}")
            return name

        starts = [" ".join(map(written, way)) for way in ways]
        names = [f"way{at}" for at in range(len(starts))]
        rules += [f"{name}: {start}" for name, start in zip(names, starts, strict=True)]
        return "\n".join(["start: " + " | ".join(names), *rules])

    def text(self, text: str) -> str:
        """A text as a Lark expression; special tokens match as tokens."""
        for special, token in self._special.items():
            before, found, behind = text.partition(special)
            if found:
                return f"{self.text(before)} <[{token}]> {self.text(behind)}".strip()
        return json.dumps(text) if text else ""


@final
class _Following:
    """A logits processor that excludes tokens that violate the grammar.

    The first call tells the prompt. Calls may return to an earlier text, as after rejected drafts.
    The logits after a text that violates the grammar are returned unchanged: its tokens were
    excluded before, so it is a draft, and will be rejected.
    """

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher, self._field = matcher, field
        self._prompt = -1  # length of the prompt
        self._consumed = torch.empty(0, dtype=torch.int64)  # the matcher's tokens

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        self._prompt = ids.shape[1] if self._prompt < 0 else self._prompt
        if not self._consumes(ids[0, self._prompt :].cpu()):
            return logits
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise _unfollowed(self._field, self._matcher.get_error())
        allowed = (mask[:, None] >> _BITS & 1).flatten()[: logits.shape[-1]]
        return logits.masked_fill(allowed.to(logits.device) == 0, float("-inf"))

    def _consumes(self, text: Tensor) -> bool:
        """Bring the matcher to the end of a text; return whether the text follows the grammar."""
        consumed = self._consumed
        kept = min(len(consumed), len(text))
        if not consumed[:kept].equal(text[:kept]):
            kept = int((consumed[:kept] != text[:kept]).nonzero()[0])
        if kept < len(consumed):
            self._matcher.rollback(len(consumed) - kept)
        new = text[kept:].tolist()
        taken = self._matcher.try_consume_tokens(new)
        self._consumed = text[: kept + taken].clone()
        return bool(taken == len(new))


def _unfollowed(field: str, error: str) -> RequestError:
    """The error for an answer that cannot follow a grammar, or cannot continue to."""
    reason = " ".join(error.split())[:300]
    return RequestError.of(field, f"is not a usable grammar: {reason}")
