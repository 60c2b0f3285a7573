"""Events: what an engine tells of a request's answers, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.serve.refused import RequestError
from kvkeep.serve.token_names import TokenName


class TokenLogprob(NamedTuple):
    """A token, and the logarithm of its probability; None: it is the first of a prompt."""

    token: TokenName
    logprob: float | None


class Scored(NamedTuple):
    """A token, the likeliest tokens in its place, and where in the answer's text it begins."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    offset: int


@dataclass(frozen=True)
class Started:
    """The request waits no longer. The first event, unless that is an error."""


@dataclass(frozen=True)
class TextDelta:
    """The next piece of an answer's text, which may be empty: a token each, then the end.

    Attributes:
        index: which of the request's answers it continues, counted prompt by prompt.
        logprobs: of its tokens; empty if they were not asked for.
        finish_reason: "stop" or "length" in the last piece of an answer, empty before.
        echo: whether it is the prompt.
    """

    index: int
    text: str
    logprobs: tuple[Scored, ...] = ()
    finish_reason: str = ""
    echo: bool = False


@dataclass(frozen=True)
class Picture:
    """What the answer's cache held a moment ago, as JSON. Call `received` when the client has
    it."""

    json: str
    received: Callable[[], None]


@dataclass(frozen=True)
class Usage:
    """All answers are complete. Counts of tokens: of the prompts, of all answers, and of the
    prompts' tokens that were found in the store instead of computed."""

    prompt: int
    completion: int
    cached: int


Event = Started | TextDelta | Picture | Usage | RequestError
"""The events of a request; the last is `Usage` or an error."""
