"""Events: what an engine tells of a request's answers, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.serve.requests import RequestError


class Named(NamedTuple):
    """A token as text, and the logarithm of its probability."""

    token: str
    logprob: float


class TokenLogprobs(NamedTuple):
    """A generated token, the likeliest ones in its place, and how many characters of the answer's
    text were passed on before it."""

    chosen: Named
    likeliest: tuple[Named, ...]
    offset: int


@dataclass(frozen=True)
class Begun:
    """The request waits no longer. The first event, unless that is an error."""


@dataclass(frozen=True)
class Piece:
    """The next piece of a choice's text, which may be empty if logprobs were asked for."""

    index: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Pictured:
    """What the answer's cache held a moment ago, as JSON. Call `got` when the client has it."""

    made: str
    got: Callable[[], None]


@dataclass(frozen=True)
class Finished:
    """A choice is complete; `reason` is "stop" or "length"."""

    index: int
    reason: str


@dataclass(frozen=True)
class Used:
    """All choices are complete. Counts of tokens: of the prompt, of all answers, and of the prompt
    those that were found in the store instead of computed."""

    prompt: int
    completion: int
    cached: int


Event = Begun | Piece | Pictured | Finished | Used | RequestError
"""The events of a request; the last is `Used` or an error."""
