"""The option `recompute=`: which tokens of reused blocks are recomputed."""

from __future__ import annotations

from typing import NamedTuple

from kvkeep.errors import SpecError

Recompute = int | float | str
"""0; a share of the tokens, above 0 and below 1; "boundary:32"; or "all"."""

RECOMPUTE = 0.15
"""The default: recompute the 15 % of the tokens whose keys and values would change most."""


class RecomputeOption(NamedTuple):
    """The parsed option: "none", "boundary", "share" or "all", and a number or share of tokens."""

    mode: str
    amount: float


def parsed(recompute: Recompute) -> RecomputeOption:
    """Parse the option.

    Raises:
        SpecError: the value is invalid.
    """
    if recompute == "all":
        return RecomputeOption("all", 1)
    if isinstance(recompute, str):
        name, _, count = recompute.partition(":")
        if name == "boundary" and count.isdigit() and int(count):
            return RecomputeOption(name, int(count))
    elif isinstance(recompute, int | float) and 0 <= recompute < 1:
        return RecomputeOption("share" if recompute else "none", recompute)
    raise SpecError(
        f"recompute={recompute!r}; give 0, a share such as 0.15, 'boundary:32' or 'all'"
    )
