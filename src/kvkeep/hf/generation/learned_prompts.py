"""Prompts and prefixes learned by PEFT, in an attached model's `generate()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import OF_LIBRARIES, cache_in, cache_name, rename_cache
from kvkeep.host.adapters import prompt_learner

Prepare = Callable[..., dict[str, Any]]

_METHOD = "prepare_inputs_for_generation"


@contextmanager
def prepared_by_peft(model: PreTrainedModel, prepare: Prepare) -> Iterator[None]:
    """A context in which PEFT puts its learned tokens, or keys and values, before the prompt once,
    and they are moved to kvkeep's cache.

    PEFT uses the cache argument's name of transformers before 5.24, and puts a learned prefix into
    its own cache.

    Args:
        prepare: kvkeep's replacement of the model's `prepare_inputs_for_generation`.
    """
    peft = prompt_learner(model)
    if peft is None:
        yield
        return
    before = model.__dict__[_METHOD]
    model.__dict__[_METHOD] = update_wrapper(partial(_prepare, model, peft, prepare), before)
    try:
        yield
    finally:
        model.__dict__[_METHOD] = before


def _prepare(
    model: PreTrainedModel, peft: Any, prepare: Prepare, input_ids: Tensor, **options: Any
) -> dict[str, Any]:
    cache = cache_in(options)
    fed = cache is not None and cache.get_seq_length() > 0

    def of_base(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(model, *args, **kwargs)
        found = rename_cache(inputs, OF_LIBRARIES)
        if found is not None and not fed:
            del inputs[OF_LIBRARIES]
        return inputs

    own = peft.base_model_prepare_inputs_for_generation
    peft.base_model_prepare_inputs_for_generation = of_base
    try:
        inputs: dict[str, Any] = peft.prepare_inputs_for_generation(input_ids, **options)
    finally:
        peft.base_model_prepare_inputs_for_generation = own
    prefix = rename_cache(inputs, cache_name(model))
    if prefix is not None and isinstance(cache, Cache) and not fed:
        cache.begin_with(prefix)
        prefix = None
    if prefix is None:
        inputs[cache_name(model)] = cache
    return inputs
