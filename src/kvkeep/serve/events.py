"""Events: what an engine tells of a request's answers, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.serve.requests import RequestError


class TokenLogprob(NamedTuple):
    """A token as text, and the logarithm of its probability."""

    token: str
    logprob: float


@dataclass(frozen=True)
class Started:
    """The request waits no longer. The first event, unless that is an error."""


@dataclass(frozen=True)
class TextDelta:
    """The next piece of an answer's text, which may be empty.

    Attributes:
        index: which of the request's answers it continues.
        offset: characters of the answer before it.
        logprobs: of its token, and of the likeliest tokens in its place; empty if they were not
            asked for.
        finish_reason: "stop" or "length" in the last piece of an answer, empty before.
    """

    index: int
    text: str
    offset: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True)
class Picture:
    """What the answer's cache held a moment ago, as JSON. Call `received` when the client has
    it."""

    json: str
    received: Callable[[], None]


@dataclass(frozen=True)
class Usage:
    """All answers are complete. Counts of tokens: of the prompt, of all answers, and of the
    prompt's tokens that were found in the store instead of computed."""

    prompt: int
    completion: int
    cached: int


Event = Started | TextDelta | Picture | Usage | RequestError
"""The events of a request; the last is `Usage` or an error."""
