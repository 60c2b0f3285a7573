"""An attached model's `generate()`: supplies a kvkeep cache, and uses a store."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import (
    NAMES,
    OF_GENERATE,
    OF_LIBRARIES,
    cache_in,
    cache_name,
    name_in,
    rename_cache,
)
from kvkeep.hf.config import ATTACHMENT, base_config, decoder_config, is_routed
from kvkeep.hf.demands import Demands
from kvkeep.hf.forward.packed_rows import require_one_text
from kvkeep.hf.forward.unserved import leaves_the_cache_to_kvkeep, require_supplied, supplying
from kvkeep.hf.forward.weights import drops_weights
from kvkeep.hf.generation.calls import CALL, BlockPrompt, Call, Settings, brings_tensors, in_force
from kvkeep.hf.generation.continuing import (
    Fed,
    feeds_last_again,
    gives_whole_text,
    require_same_beginning,
)
from kvkeep.hf.generation.filling import (
    activate_later,
    begun_alike,
    compress_prompt,
    filled,
    invoked,
)
from kvkeep.hf.generation.learned_prompts import prepared_by_peft
from kvkeep.hf.generation.replaying import Replaying
from kvkeep.hf.inputs import check_rows
from kvkeep.hf.interface.transformers_names import layers_restored
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.kinds.multimodal import resume
from kvkeep.host import per_layer
from kvkeep.host.adapters import learned_tokens
from kvkeep.host.compress import compresses
from kvkeep.layer.history import Prompt
from kvkeep.spec import CacheSpec
from kvkeep.threads import following_load

_OF_A_PROMPT = (*NAMES, "attention_mask", "position_ids", "inputs_embeds")
_CUT_BY_COLUMNS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""The tensors that transformers divides into chunks along with the token ids."""


def generate(model: PreTrainedModel, settings: Settings, *args: Any, **kwargs: Any) -> Any:
    """The model's `generate`, which looks up the prompt's prefix in the store and stores the
    result. If it raises before any token is fed to a given cache, the cache's rows are restored."""
    settings = in_force(model, settings)
    asked = args[0] if args else kwargs.get("inputs")
    asked = kwargs.get("input_ids") if asked is None else asked
    blocks = asked if isinstance(asked, BlockPrompt) else None
    check_rows({**kwargs, "inputs": args[0]} if args else kwargs)
    if blocks is not None:
        given = [name for name in _OF_A_PROMPT if kwargs.get(name) is not None]
        if given:
            raise StateError(f"a prompt with blocks has its own {given[0]}; leave out {given[0]}")
        asked = blocks.input_ids.to(model.device)
        rest = {name: x for name, x in kwargs.items() if name not in ("inputs", "input_ids")}
        args, kwargs = (asked, *args[1:]), rest | {"attention_mask": torch.ones_like(asked)}
    ids = asked if isinstance(asked, Tensor) and asked.dim() == 2 and asked.shape[1] else None
    columns = 0 if ids is None else ids.shape[1]
    given_cache = rename_cache(kwargs, OF_GENERATE)
    one = ids if ids is not None and len(ids) == 1 else None
    supplies = given_cache is None and leaves_the_cache_to_kvkeep(model, args, kwargs)
    if supplies or isinstance(given_cache, Cache):
        require_one_text(kwargs)
    call = Call(model, columns, one, blocks, ids)
    token = CALL.set(call)
    if isinstance(given_cache, Cache) and given_cache.fed:
        resume(model, given_cache)
    try:
        with (
            following_load() as call.adapt,
            supplying(model if supplies else None),
            _rows_restored(given_cache),
            layers_restored(model),
            prepared_by_peft(model, prepare_inputs),
            closing(call),
        ):
            output = type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
    finally:
        CALL.reset(token)
    if call.recording is not None:
        call.recording.end_recording()
    said = getattr(output, "sequences", output)
    if call.fed is not None and call.rows is not None and kwargs.get("custom_generate") is None:
        call.fed.note(call.rows, said)
    cache = call.cache
    if cache is None or cache.rows != 1:
        return output
    if settings.store and isinstance(said, Tensor):
        settings.store.learn(model, said[0, : cache.fed], cache, namespace=settings.namespace)
    return output


@contextmanager
def _rows_restored(given: Any) -> Iterator[None]:
    cache = given if isinstance(given, Cache) and given.fed else None
    before = (0, 0) if cache is None else (cache.fed, cache.rows)
    try:
        yield
    except BaseException:
        if cache is not None and cache.fed == before[0] and cache.rows > before[1]:
            cache.select(torch.arange(0, cache.rows, cache.rows // before[1]))
        raise


def prepare_cache(
    model: PreTrainedModel,
    settings: Settings,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Replaces the model's method: `generate` gets a kvkeep cache if it would build a DynamicCache.

    The rows of a kvkeep cache that holds a prompt are repeated for beams or several answers, and
    share its slots.
    """
    settings = in_force(model, settings)
    several = max(generation_config.num_beams, generation_config.num_return_sequences)
    learned = learned_tokens(model)
    drafted = generation_mode == GenerationMode.ASSISTED_GENERATION
    drafting = bool(generation_config.is_assistant)
    given = cache_in(model_kwargs)
    as_written = bool(learned) or generation_config.output_attentions or drops_weights(model)
    demands = Demands(
        drafts=drafted or drafting,
        weights=bool(generation_config.output_attentions),
        columns=max_cache_length + learned,
        routed=is_routed(decoder_config(base_config(model))),
    )
    if isinstance(given, Cache):
        demands.require(given)
        given.written_out = as_written
    if isinstance(given, Cache) and given.fed:
        all_given = _continue(model, generation_config, model_kwargs, given)
        if drafted:
            _require_whole_text(given, all_given=all_given)
        activate_later(model, given)
        if several > 1 and given.rows == batch_size:
            given.freeze()
            given.repeat(several)
    if isinstance(given, Cache) and compresses(given) and not drafting:
        compress_prompt(model, model_kwargs, given, generation_config.prefill_chunk_size)
    if isinstance(given, Cache):
        _chunk_prompt(model, settings, generation_config, model_kwargs, given.specs, given.fed)
        _expect_fed(model, given, generation_config, generation_mode, model_kwargs)
        if drafted:
            _record_after_prompt(model, given, generation_config.prefill_chunk_size)
    type(model)._prepare_cache_for_generation(  # type: ignore[attr-defined]
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    built = cache_in(model_kwargs)
    if given is not None or type(built) is not DynamicCache or built.offloading:
        if given is None:
            require_supplied(model, built)
        if isinstance(given, Cache):
            _plan_steps(model, given, generation_config, generation_mode, max_cache_length)
        if drafted:
            _require_returning(model, built)
        return
    if demands.drafts or demands.weights:
        demands.require(Cache(model, settings.spec))
    kinds = layer_kinds(base_config(model))
    specs = per_layer(settings.spec, kinds)
    _chunk_prompt(model, settings, generation_config, model_kwargs, specs, 0)
    cache, chunk = None, generation_config.prefill_chunk_size
    # Prompt lookup may draft tokens beyond the maximum length.
    most = max_cache_length + learned + (generation_config.prompt_lookup_num_tokens or 0)
    whole = [spec for spec, kind in zip(specs, kinds, strict=True) if kind.window is None]
    if any(spec.policy.compression for spec in whole):
        if drafting:
            raise UnsupportedError("kvzip compresses no prompt of a draft model; use keep_all")
        cache = None if drafted else filled(model, settings, model_kwargs, chunk, max_cache_length)
        if cache is None:
            cache = Cache(model, settings.spec, capacity=most)
            compress_prompt(model, model_kwargs, cache, chunk)
    elif not (drafting or drafted or generation_config.token_healing):
        cache = filled(model, settings, model_kwargs, chunk, max_cache_length)
        if cache is None:
            cache = begun_alike(model, settings, model_kwargs, several, chunk, max_cache_length)
    if cache is not None and several > 1:
        cache.freeze()
        cache.repeat(several)
    if cache is None:
        # A draft model's length is known for its first round only.
        cache = Cache(model, settings.spec, capacity=None if drafting else most)
        cache.activation = invoked(model)
    cache.drafting = drafting
    if drafted or drafting:
        _record_after_prompt(model, cache, chunk)
    if drafting:
        cache.activate_past_recording()
    cache.written_out = as_written
    _plan_steps(model, cache, generation_config, generation_mode, max_cache_length)
    model_kwargs[OF_GENERATE] = cache
    _expect_fed(model, cache, generation_config, generation_mode, model_kwargs)


def _plan_steps(
    model: PreTrainedModel, cache: Cache, generation_config: Any, mode: Any, columns: int
) -> None:
    """Let a call on a GPU replay its steps, if possible. `columns`: the most columns that it will
    have. Warn if a call asks transformers to compile steps that it will not compile."""
    _tell_if_not_compiled(model, generation_config, cache)
    call, forward = CALL.get(), model.__dict__.get("forward")
    if call is not None and call.model is model and isinstance(forward, Replaying):
        forward.plan(call, cache, generation_config, mode, columns)


def _tell_if_not_compiled(model: PreTrainedModel, generation_config: Any, cache: Cache) -> None:
    """Warn if a call asks transformers to compile steps that it will not compile."""
    asked, steps = generation_config.compile_config, getattr(model, ATTACHMENT, None)
    if asked is None or cache.is_compileable or (steps is not None and steps.compiled):
        return
    specs = ", ".join(dict.fromkeys(map(str, cache.specs)))
    warnings.warn(
        f"compile_config has no effect with the cache {specs}, because transformers compiles "
        'steps only if slots have fixed addresses; use a spec with fixed storage, "...@fixed", '
        "or leave out compile_config and call kvkeep.attach(model, spec, compile=True)",
        stacklevel=2,
    )


def prepare_inputs(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> dict[str, Any]:
    """Replaces the model's `prepare_inputs_for_generation`. In a call with drafts, transformers
    gives the whole text to the first forward; it is cut to the tokens that the cache lacks. If the
    cache already holds the whole text, its last token is removed and fed again."""
    owner: Any = type(model)
    owner = owner.prepare_inputs_for_generation
    call, cache = CALL.get(), rename_cache(options, name_in(owner) or OF_GENERATE)
    if call is not None:
        call.adapt()
    if call is not None and call.again is not None and call.again is cache:
        call.again = None
        cache.crop(-1)
        options["next_sequence_length"] = None if call.recording is cache else 1
    if call is not None and call.recording is not None and call.recording is cache and cache.fed:
        options["next_sequence_length"] = (
            options.get("next_sequence_length") or input_ids.shape[1] - cache.fed
        )
    inputs: dict[str, Any] = owner(model, input_ids, **options)
    wrapped = not isinstance(cache, Cache | DynamicCache | None)  # maybe PEFT's pair of caches
    rename_cache(inputs, OF_LIBRARIES if wrapped else cache_name(model))
    return inputs


def _continue(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], cache: Cache
) -> bool:
    """Prepare a call whose cache holds tokens. Returns whether its prompt is the whole text.

    Raises:
        StateError: the prompt does not continue the cache's tokens.
    """
    call, embedded = CALL.get(), model_kwargs.get("inputs_embeds")
    if call is None or call.model is not model or learned_tokens(model):
        return True
    columns = call.columns if embedded is None else embedded.shape[1]
    whole = gives_whole_text(model_kwargs, columns, generation_config)
    if not (whole and columns):
        return whole
    if feeds_last_again(cache, columns):
        call.again, generation_config.prefill_chunk_size = cache, None
    if call.rows is not None and embedded is None:
        require_same_beginning(cache, call.rows, model_kwargs.get("attention_mask"))
    return True


def _expect_fed(
    model: PreTrainedModel,
    cache: Cache,
    generation_config: Any,
    mode: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """Record which tokens a call will feed to its cache, if its token ids say it."""
    call = CALL.get()
    if call is None or call.model is not model or call.rows is None or learned_tokens(model):
        return
    if model_kwargs.get("inputs_embeds") is not None or cache is call.moved:
        return
    whole = not cache.fed or gives_whole_text(model_kwargs, call.columns, generation_config)
    call.fed = Fed(cache, 0 if whole else cache.fed, mode)


def _require_whole_text(cache: Cache, *, all_given: bool) -> None:
    """Raise UnsupportedError if drafts cannot be verified with a cache that holds tokens.
    `all_given`: the prompt includes these tokens."""
    if cache.carried and any(layer.policy.evicts for layer in cache.layers):
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and its recurrent states could not return to "
            "this point after the first drafts if tokens were evicted since; use keep_all, give "
            "an empty cache, or do not draft"
        )
    if not all_given:
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and drafts are found in the whole text, but "
            "only new token ids are given; give all token ids, including the cache's"
        )


def _require_returning(model: PreTrainedModel, cache: Any) -> None:
    """Raise UnsupportedError if drafts could not be removed from a cache."""
    if type(model)._is_stateful and not isinstance(cache, Cache):
        raise UnsupportedError(
            f"drafts with a {type(cache).__name__}, which cannot return the recurrent layers of "
            f"{type(model).__name__} to an earlier point; give a kvkeep.Cache, or neither a cache "
            "nor cache_implementation"
        )


def _record_after_prompt(model: PreTrainedModel, cache: Cache, chunk: int | None) -> None:
    """Let a cache that will record drafts read the prompt as without drafts.

    The first forward of a model that verifies drafts contains the prompt and the first drafts. A
    draft model may have to remove the last token of the prompt too.
    """
    call = CALL.get()
    if call is None or call.model is not model:
        return
    cache.prompt = Prompt(max(0, call.columns - cache.drafting), chunk)
    if not cache.drafting:
        call.recording = cache


def _chunk_prompt(
    model: PreTrainedModel,
    settings: Settings,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    specs: Sequence[CacheSpec],
    fed: int,
) -> None:
    """Make `generate` feed a long prompt in chunks if a layer has a budget, so that the cache never
    holds the whole prompt. A chunk size given with the call takes precedence.

    The prompt is not divided if the call returns outputs for the whole prompt or has inputs other
    than token ids, nor if `generate` compiles its steps, because it would compile a step for each
    chunk length.
    """
    call, chunk = CALL.get(), settings.prefill_chunk
    if chunk is None or generation_config.prefill_chunk_size is not None:
        return
    if call is None or call.model is not model or call.columns - fed <= chunk:
        return
    compiled = model.device.type != "cpu" or generation_config.compile_config is not None
    if (
        not any(spec.policy.evicts for spec in specs)
        or learned_tokens(model)
        or brings_tensors(model_kwargs, beside=_CUT_BY_COLUMNS)
        or generation_config.output_hidden_states
        or generation_config.output_attentions
        or (compiled and all(spec.storage.limited for spec in specs))
    ):
        return
    generation_config.prefill_chunk_size = chunk


def refuse_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Replaces an attached model's `init_continuous_batching`, which `generate_batch` calls.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"generate_batch of this {type(model).__name__} uses its own paged cache, not kvkeep's; "
        "call kvkeep.detach(model) first, or model.generate() with a batch"
    )
