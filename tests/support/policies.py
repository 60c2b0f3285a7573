"""Specs of the policies that a test's own list leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvkeep.testing import EXAMPLES


def unnamed(specs: Iterable[str]) -> tuple[str, ...]:
    """Examples of policies that no spec names. Not of `kvzip`, which evicts in `compress` only, and
    not of `kvzap`, which has none."""
    named = {re.split(r"[:(+@]", spec)[0] for spec in specs}
    return tuple(text for name, text in EXAMPLES.items() if name not in named | {"kvzip"})
