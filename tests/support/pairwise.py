"""Fewer cases than a full product: each pair of values of two parameters occurs in one at least."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

Case = TypeVar("Case")


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Some of the product of `choices`, in its order, that together have all its pairs."""
    places = covering(product(*(range(len(values)) for values in choices)), lambda at: at)
    return [tuple(v[i] for v, i in zip(choices, at, strict=True)) for at in places]


def covering(cases: Iterable[Case], features: Callable[[Case], tuple[Hashable, ...]]) -> list[Case]:
    """Some of `cases`, in their order: each pair of features that one of all has, one of these has.

    Greedy: the case that adds most pairs comes next, the first of equals.
    """
    given = list(cases)
    pairs = {i: _pairs(features(case)) for i, case in enumerate(given)}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda i: len(pairs[i] & missing))
        chosen.append(best)
        missing -= pairs.pop(best)
    return [given[i] for i in sorted(chosen)]


def _pairs(features: tuple[Hashable, ...]) -> set[Any]:
    return set(combinations(enumerate(features), 2))
