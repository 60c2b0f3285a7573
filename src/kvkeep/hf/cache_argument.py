"""The argument by which a transformers model takes its cache.

It is `cache` from transformers 5.24 on, and was `past_key_values` before. The code of a model that
does not come with transformers may keep the earlier name, so the name is read from the signature of
each model's forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

NAMES = ("cache", "past_key_values")
"""The names of the argument; where a call gives both, the first counts."""


OF_LIBRARIES = "past_key_values"
"""The name by which other libraries know the argument."""


@functools.cache
def name_in(function: Callable[..., Any]) -> str | None:
    """The name by which a function takes a cache; None: no argument of it has one of the names."""
    parameters = inspect.signature(function).parameters
    return next((name for name in NAMES if name in parameters), None)


OF_GENERATE = name_in(GenerationMixin.prepare_inputs_for_generation) or NAMES[0]
"""The name by which this version's `generate` hands a cache to the methods it calls."""


def cache_name(model: Any) -> str:
    """The name by which a model's forward takes its cache. A PEFT model has that of its base."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return name_in(type(model).forward) or OF_GENERATE


def as_cache(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as a keyword argument of a model's forward."""
    return {cache_name(model): cache}


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either name; None: there is none."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def rename_cache(given: dict[str, Any], name: str) -> Any:
    """Give the cache among keyword arguments its name in the called function, in place; returns the
    cache."""
    cache = cache_in(given)
    for other in NAMES:
        given.pop(other, None)
    if cache is not None:
        given[name] = cache
    return cache
