"""Limits: what clients may take of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import final

from kvkeep.errors import SpecError

_BYTES_PER_TOKEN = 16
_LEAST_PROMPT, _MOST_PROMPT = 64 * 2**10, 8 * 2**20
_UNKNOWN_CONTEXT = 2**16


@final
@dataclass(frozen=True)
class Limits:
    """What clients may take of a server, one at a time and all together.

    Args:
        queue: requests of one key name that may wait while another is answered; more get 429.
        wait_s: seconds that a request may wait for its turn; then it gets 503.
        answer_tokens: most tokens of all answers to one request, `n` times `max_tokens`.
        prompt_bytes: most bytes of a prompt, compared before it is rendered or tokenised; None: 16
            for each token of the model's context, but 64 KiB to 8 MiB.
        timeout_s: seconds for a request to arrive whole, and for a client to take what it was sent.
        connections: most at a time; more are closed.

    Raises:
        SpecError: a limit that lets nothing through, or everything.
    """

    queue: int = 64
    wait_s: float = 300.0
    answer_tokens: int = 8192
    prompt_bytes: int | None = None
    timeout_s: float = 30.0
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 or (field.name == "queue" and value == 0)):
                raise SpecError(f"{field.name} of {value}; give more")
            if value is not None and math.isinf(value):
                raise SpecError(f"{field.name} of {value}; give a finite number")

    def prompt_of(self, context: int | None) -> int:
        """Most bytes of a prompt for a model of that context, in tokens; None: it has no limit."""
        if self.prompt_bytes is not None:
            return self.prompt_bytes
        estimate = _BYTES_PER_TOKEN * (context or _UNKNOWN_CONTEXT)
        return min(max(estimate, _LEAST_PROMPT), _MOST_PROMPT)
