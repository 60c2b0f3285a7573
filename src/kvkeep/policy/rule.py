"""Rule: a policy's decode step (one token per row), as data for the native library."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class Enter(IntEnum):
    """The value of a policy's plane for a new token; KvEnter of native/abi.h."""

    ZERO = 0
    KEY_NORM = 1  # minus the norm of the token's key
    VALUE_NORM = 2  # the norm of its value
    ERROR = 3  # the encoding error of its key and value, see `Arrivals`
    GIVEN = 4  # from `Policy.enter`
    HASH = 5  # a hash of its position, its head and `Rule.seed`, see `Random`


class Learn(IntEnum):
    """How the mass m of a step's query changes the score; KvLearn of native/abi.h."""

    NOTHING = 0
    SUM = 1  # score + m
    MEAN = 2  # the mean of m over all heads
    FADE = 3  # score * (1 - fade) + m * fade
    WEIGHTED = 4  # score + m * w / sum(m * w), where w is the policy's last plane


class Rule(NamedTuple):
    """A policy's decode step: the planes of the new token, the update of scores, and the ranking.

    A layer whose policy has a rule runs the step in one native call. `Policy.enter`, `observe` and
    `victims` do the same in Python, for chunks and without the library.

    Args:
        enter: how each plane of the policy begins: the score first, the error for `mix` second.
        learn: see `Learn`.
        fade: see `Learn.FADE`.
        by_query: scores are divided by the number of queries that saw the slot.
        by_keys: slots are ranked by minus the cosine between their keys and the mean direction of
            the head's keys.
        mix: slots are ranked by mix * score - (1 - mix) * error, with score and error scaled to
            0..1 over a head; see `Enter.ERROR`. None: by the score.
        seed: see `Enter.HASH`.
        floor: heads compete for the slots of a layer, and each keeps at least this share of the
            budget. None: heads do not compete.
        interval: scores are computed anew at positions p where p + 1 is a multiple of `interval`,
            from the policy's state, see `ExpectedAttention`; 0: they are not.
        future: number of next positions for whose queries they are computed.
    """

    enter: Mapping[str, Enter] = {}
    learn: Learn = Learn.NOTHING
    fade: float = 0.0
    by_query: bool = False
    by_keys: bool = False
    mix: float | None = None
    seed: int = 0
    floor: float | None = None
    interval: int = 0
    future: int = 0
