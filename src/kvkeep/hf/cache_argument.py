"""The argument by which a transformers model takes its cache.

It is named `cache` from transformers 5.24 on, and `past_key_values` before. Models that do not come
with transformers may keep the earlier name, so the name is read from the signature of each model's
forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

from kvkeep.errors import SpecError

NAMES = ("cache", "past_key_values")
"""The names of the argument; if a call gives both, the first counts."""


OF_LIBRARIES = "past_key_values"
"""The name that other libraries use for the argument."""


@functools.cache
def name_in(function: Callable[..., Any]) -> str | None:
    """The name of a function's cache argument; None: it has none."""
    parameters = inspect.signature(function).parameters
    return next((name for name in NAMES if name in parameters), None)


OF_GENERATE = name_in(GenerationMixin.prepare_inputs_for_generation) or NAMES[0]
"""The name by which this version's `generate` passes a cache to the methods it calls."""


def cache_name(model: Any) -> str:
    """The name of the cache argument of a model's forward; for a PEFT model, of its base model."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return name_in(type(model).forward) or OF_GENERATE


def as_cache(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as a keyword argument of a model's forward."""
    return {cache_name(model): cache}


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either name; None: no cache."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def rename_cache(given: dict[str, Any], name: str) -> Any:
    """Rename the cache among keyword arguments to `name`, in place; returns the cache.

    Raises:
        SpecError: it is the spec of a cache.
    """
    cache = cache_in(given)
    if isinstance(cache, str):
        raise SpecError(
            f"{cache!r} is the spec of a cache, not a cache; give kvkeep.Cache(model, {cache!r})"
        )
    for other in NAMES:
        given.pop(other, None)
    if cache is not None:
        given[name] = cache
    return cache
