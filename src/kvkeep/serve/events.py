"""Events: what an engine reports about a request's answers, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.serve.refused import RequestError
from kvkeep.serve.token_names import TokenName


class TokenLogprob(NamedTuple):
    """A token and its log-probability; None for the first token of a prompt."""

    token: TokenName
    logprob: float | None


class Scored(NamedTuple):
    """A token, the likeliest tokens at its place, and its offset in the answer's text."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    offset: int


@dataclass(frozen=True)
class Started:
    """The request's first answer starts. The first event, unless the request fails before."""


@dataclass(frozen=True)
class TextDelta:
    """The next piece of an answer's text, which may be empty: one piece per token, then a last one.

    Attributes:
        index: index of the answer in the request, counted prompt by prompt.
        logprobs: log-probabilities of the piece's tokens; empty if the request asks for none.
        finish_reason: "stop" or "length" in an answer's last piece, empty before.
        echo: whether the piece is the prompt.
    """

    index: int
    text: str
    logprobs: tuple[Scored, ...] = ()
    finish_reason: str = ""
    echo: bool = False


@dataclass(frozen=True)
class Picture:
    """The content of the answer's cache a moment ago, as JSON. Call `received` after the client has
    received it."""

    json: str
    received: Callable[[], None]


@dataclass(frozen=True)
class Usage:
    """All answers are complete. Token counts of the prompts, of all answers, and of the prompt
    tokens found in the store."""

    prompt: int
    completion: int
    cached: int


Event = Started | TextDelta | Picture | Usage | RequestError
"""The events of a request; the last is `Usage` or an error."""
