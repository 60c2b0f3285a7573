"""Raises an error at the first step of an attached model that does not use the cache that kvkeep
supplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from kvkeep.context import within
from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.forward.packed import LaidCache
from kvkeep.version import TESTED


@dataclass
class _Supplied:
    """A call of `generate()` whose cache kvkeep supplies, and whether the decoder's hook has run
    during the call."""

    model: PreTrainedModel
    hooked: bool = False


_SUPPLIED: ContextVar[_Supplied | None] = ContextVar("supplied", default=None)


@contextmanager
def supplying(model: PreTrainedModel | None) -> Iterator[None]:
    """A context in which steps of an attached model without kvkeep's cache raise.

    Args:
        model: the model of a call of `generate()` whose cache kvkeep supplies; None: the call has
            its own cache, or asks for one of transformers' caches.
    """
    with within(_SUPPLIED, None if model is None else _Supplied(model)):
        yield


def leaves_the_cache_to_kvkeep(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call of `generate()` without a cache leaves the choice of cache to the model."""
    given = [x for x in (*args, kwargs.get("generation_config")) if isinstance(x, GenerationConfig)]

    def option(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        chosen = (getattr(config, name, None) for config in (*given, model.generation_config))
        return next((x for x in chosen if x is not None), None)

    return option("cache_implementation") is None and option("use_cache") is not False


def require_supplied(model: PreTrainedModel, cache: Any) -> None:
    """Check the cache of a forward of an attached model, or the cache that `generate()` built.

    Raises:
        UnsupportedError: kvkeep supplies the cache, but this is another cache.
    """
    call = _SUPPLIED.get()
    if call is None or call.model is not model:
        return
    call.hooked = True
    if cache is not None and not isinstance(cache, (Cache, LaidCache)):
        raise not_served(model, f"generate() gave it a {type(cache).__name__}")


def require_hooked(module: nn.Module) -> None:
    """Called when an attached model's attention gets keys that are not from a kvkeep cache.

    Raises:
        UnsupportedError: kvkeep supplies the cache, but the decoder's hook has not run.
    """
    call = _SUPPLIED.get()
    if call is not None and not call.hooked and module in {*call.model.modules()}:
        raise not_served(call.model, f"{type(module).__name__} ran without the decoder's hooks")


def not_served(model: nn.Module, seen: str) -> UnsupportedError:
    """The error for a step of an attached model that did not use kvkeep's cache.

    Args:
        seen: the fault, as a clause.
    """
    return UnsupportedError(
        f"{type(model).__name__} is attached, but this step did not run through kvkeep's cache: "
        f"{seen}. A class that overrides methods of transformers, a patch by another library, or "
        f"transformers {transformers.__version__} may be the reason; kvkeep was tested with "
        f"{TESTED['transformers']}. Call kvkeep.detach(model) to run the model without kvkeep"
    )
