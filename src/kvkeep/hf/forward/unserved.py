"""Attached models that run without the cache that kvkeep supplies: an error at the first step."""

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
    """A call of `generate()` whose cache kvkeep supplies, and whether the decoder's hook has run in
    it."""

    model: PreTrainedModel
    hooked: bool = False


_SUPPLIED: ContextVar[_Supplied | None] = ContextVar("supplied", default=None)


@contextmanager
def supplying(model: PreTrainedModel | None) -> Iterator[None]:
    """Within this context, steps of an attached model without kvkeep's cache are errors.

    Args:
        model: the model of a call of `generate()` whose cache kvkeep supplies; None: a call that
            brings a cache, or asks for one of transformers' kinds.
    """
    with within(_SUPPLIED, None if model is None else _Supplied(model)):
        yield


def leaves_the_cache_to_kvkeep(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call of `generate()` without a cache leaves its choice to the model."""
    given = [x for x in (*args, kwargs.get("generation_config")) if isinstance(x, GenerationConfig)]

    def option(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        chosen = (getattr(config, name, None) for config in (*given, model.generation_config))
        return next((x for x in chosen if x is not None), None)

    return option("cache_implementation") is None and option("use_cache") is not False


def require_supplied(model: PreTrainedModel, cache: Any) -> None:
    """Check the cache of a forward of an attached model, or the one that `generate()` built for it.

    Raises:
        UnsupportedError: it is another one where kvkeep supplies it.
    """
    call = _SUPPLIED.get()
    if call is None or call.model is not model:
        return
    call.hooked = True
    if cache is not None and not isinstance(cache, (Cache, LaidCache)):
        raise not_served(model, f"generate() gave it a {type(cache).__name__}")


def require_hooked(module: nn.Module) -> None:
    """Called where an attached model's attention gets keys that are not from kvkeep's cache.

    Raises:
        UnsupportedError: kvkeep supplies the cache, and the decoder's hook has not run.
    """
    call = _SUPPLIED.get()
    if call is not None and not call.hooked and module in {*call.model.modules()}:
        raise not_served(call.model, f"{type(module).__name__} ran without the decoder's hooks")


def not_served(model: nn.Module, seen: str) -> UnsupportedError:
    """The error for a step of an attached model that did not use kvkeep's cache.

    Args:
        seen: what was found instead, as a clause.
    """
    return UnsupportedError(
        f"{type(model).__name__} is attached, but this step did not run through kvkeep's cache: "
        f"{seen}. A class that overrides methods of transformers, a patch by another library, or "
        f"transformers {transformers.__version__} may be the reason; kvkeep was tested with "
        f"{TESTED['transformers']}. Call kvkeep.detach(model) to run the model without kvkeep"
    )
