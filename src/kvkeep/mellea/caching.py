"""Caching: the model option that sets how one call of a backend caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.blocks.recompute_option import Recompute, parsed
from kvkeep.errors import SpecError
from kvkeep.host import Specs
from kvkeep.store import PrefixStore

CACHING = "kvkeep"
"""Key of the model option whose value is a `Caching`."""


@dataclass(frozen=True)
class Caching:
    """How a call caches. Fields that are None take the backend's values.

    Args:
        spec: spec of its caches.
        store: the store for its prompt and blocks.
        namespace: namespace of the store's entries.
        recompute: which tokens of blocks are recomputed; see `kvkeep.blocks.prefill`.
        reuse: False: the call neither reads from a store nor writes to it.

    Raises:
        SpecError: `recompute` is invalid.
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
        """Fill unset options from the backend's defaults."""
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        return replace(default, **chosen)


@dataclass(frozen=True)
class Resolved:
    """A call's caching options without unset fields; see `Caching`."""

    spec: Specs
    store: PrefixStore
    namespace: str
    recompute: Recompute
    reuse: bool = True


def caching_in(options: Mapping[str, Any]) -> Caching:
    """Read the `Caching` from a call's model options.

    Raises:
        SpecError: the value is not a `Caching`.
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
