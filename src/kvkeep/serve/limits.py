"""Limits: how much time and memory of a server clients may use."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import final

from kvkeep.errors import SpecError

_BYTES_PER_TOKEN = 16
_LEAST_PROMPT, _MOST_PROMPT = 64 * 2**10, 8 * 2**20
_UNKNOWN_CONTEXT = 2**16


@final
@dataclass(frozen=True)
class Limits:
    """Limits on one client's requests, and on all clients together.

    Args:
        queue: most requests of one key name that may wait while `sequences` answers are in
            progress; further requests get status 429.
        wait_s: seconds that a request may wait for its turn; then it gets status 503.
        answer_tokens: most tokens of all answers to one request, `n` times `max_tokens`.
        prompt_bytes: most bytes of a prompt, checked before it is rendered or tokenised. None: 16
            per token of the model's context, but at least 64 KiB and at most 8 MiB.
        timeout_s: seconds for a request to arrive completely, and for a client to read each write.
        connections: most open connections; further connections are closed.
        sequences: most answers in progress at once.
        cache_bytes: most bytes that the caches of all answers in progress may reach, as their specs
            bound them; None: only `sequences` limits them.
        response_bytes: most bytes of kept responses; 0: none is kept.
        image_bytes: most bytes of the image files of one request.
        image_hosts: hosts from which images may be fetched; "*": all.
        drafts: most draft tokens in a step of an answer; see `SamplingParams`. 0: no drafts.

    Raises:
        SpecError: a limit is not positive (`queue`, `response_bytes` and `drafts` may be 0), or
            infinite.
    """

    queue: int = 64
    wait_s: float = 300.0
    answer_tokens: int = 8192
    prompt_bytes: int | None = None
    timeout_s: float = 30.0
    connections: int = 512
    sequences: int = 16
    cache_bytes: int | None = None
    response_bytes: int = 0
    image_bytes: int = 20 * 10**6
    image_hosts: Collection[str] = ()
    drafts: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float):
                continue
            none = value == 0 and field.name in ("queue", "response_bytes", "drafts")
            if not (value > 0 or none):
                raise SpecError(f"{field.name} is {value}; give a larger number")
            if math.isinf(value):
                raise SpecError(f"{field.name} is {value}; give a finite number")

    def prompt_of(self, context: int | None) -> int:
        """Most bytes of a prompt for a model with a context of `context` tokens (None: unknown or
        unlimited; 65536 is assumed)."""
        if self.prompt_bytes is not None:
            return self.prompt_bytes
        estimate = _BYTES_PER_TOKEN * (context or _UNKNOWN_CONTEXT)
        return min(max(estimate, _LEAST_PROMPT), _MOST_PROMPT)
