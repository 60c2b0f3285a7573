"""Caching: how one call of a backend caches, given in its model options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.blocks.recompute_option import Recompute, parsed
from kvkeep.errors import SpecError
from kvkeep.host import Specs
from kvkeep.store import PrefixStore

CACHING = "kvkeep"
"""The key of model options whose value is a `Caching`."""


@dataclass(frozen=True)
class Caching:
    """How a call caches. What is None is as the backend has it.

    Args:
        spec: spec of its caches.
        store: the store for its prompt and blocks.
        namespace: namespace of the store's entries.
        recompute: which tokens of blocks are recomputed: see `kvkeep.blocks.prefill`.
        reuse: False: it neither takes anything from a store nor leaves anything there.

    Raises:
        SpecError: a `recompute` that does not exist.
    """

    spec: Specs | None = None
    store: PrefixStore | None = None
    namespace: str | None = None
    recompute: Recompute | None = None
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.recompute is not None:
            parsed(self.recompute)

    def over(self, default: Resolved) -> Resolved:
        """With a backend's choices where it makes none."""
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        return replace(default, **chosen)


@dataclass(frozen=True)
class Resolved:
    """How a call caches: see `Caching`."""

    spec: Specs
    store: PrefixStore
    namespace: str
    recompute: Recompute
    reuse: bool = True


def caching_in(options: Mapping[str, Any]) -> Caching:
    """How the model options of a call say to cache.

    Raises:
        SpecError: the value is no `Caching`.
    """
    given = options.get(CACHING)
    if given is None:
        return Caching()
    if not isinstance(given, Caching):
        raise SpecError(
            f"the model option {CACHING!r} is {given!r}; give a kvkeep.mellea.Caching, such as "
            "Caching(reuse=False)"
        )
    return given
