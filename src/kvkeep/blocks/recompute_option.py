"""How much of what was joined is computed again."""

from __future__ import annotations

from typing import NamedTuple

from kvkeep.errors import SpecError

Recompute = int | float | str
"""0; a share of the tokens, above 0 and below 1; "boundary:32"; or "all"."""

RECOMPUTE = 0.15
"""What is computed again if nothing else is said."""


class Repair(NamedTuple):
    """What `recompute=` says: "none", "boundary", "share" or "all", and how many."""

    mode: str
    amount: float


def parsed(recompute: Recompute) -> Repair:
    """What it says.

    Raises:
        SpecError: it says nothing that is known.
    """
    if recompute == "all":
        return Repair("all", 1)
    if isinstance(recompute, str):
        name, _, count = recompute.partition(":")
        if name == "boundary" and count.isdigit() and int(count):
            return Repair(name, int(count))
    elif isinstance(recompute, int | float) and 0 <= recompute < 1:
        return Repair("share" if recompute else "none", recompute)
    raise SpecError(
        f"recompute={recompute!r}; give 0, a share such as 0.15, 'boundary:32' or 'all'"
    )
