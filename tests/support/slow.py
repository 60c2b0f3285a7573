"""Parameters of a test of which `make test` takes some, and `make slow` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """`cases`, of which those that are not `quick` are slow."""
    return [case if quick(case) else _slow(case) for case in cases]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """`cases`, of which all but the first of each `step` in turn are slow."""
    return [_slow(case) if i % step else case for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
