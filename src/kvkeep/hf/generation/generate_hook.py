"""An attached model's `generate()`: supplies a kvkeep cache, and uses a store."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.blocks import Encoded
from kvkeep.context import within
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
from kvkeep.hf.generation import continuing, filling
from kvkeep.hf.generation.calls import CALL, Call, Settings, Start, in_force
from kvkeep.hf.generation.learned_prompts import prepared_by_peft
from kvkeep.hf.generation.replaying import Replaying
from kvkeep.hf.inputs import check_rows
from kvkeep.hf.interface.transformers_names import layers_restored
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.kinds.multimodal import brings_tensors, resume
from kvkeep.host import per_layer
from kvkeep.host.compress import compresses
from kvkeep.layer.history import Prompt
from kvkeep.spec import CacheSpec
from kvkeep.threads import following_load

_CUT_BY_COLUMNS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""The tensors that transformers divides into chunks along with the token ids."""
_OF_A_PROMPT = (*NAMES, "attention_mask", "position_ids", "inputs_embeds")


def generate(model: PreTrainedModel, settings: Settings, *args: Any, **kwargs: Any) -> Any:
    """The model's `generate`, which looks up the prompt's prefix in the store and stores the
    result. If it raises before any token is fed to a given cache, the cache's rows are restored."""
    settings = in_force(model, settings)
    asked = args[0] if args else kwargs.get("inputs")
    asked = kwargs.get("input_ids") if asked is None else asked
    blocks = asked if isinstance(asked, Encoded) else None
    check_rows({**kwargs, "inputs": args[0]} if args else kwargs)
    if blocks is not None:
        given = [name for name in _OF_A_PROMPT if kwargs.get(name) is not None]
        if given:
            raise StateError(f"a prompt with blocks has its own {given[0]}; leave out {given[0]}")
        asked = blocks.input_ids.to(model.device)
        rest = {name: x for name, x in kwargs.items() if name not in ("inputs", "input_ids")}
        args, kwargs = (asked, *args[1:]), rest | {"attention_mask": torch.ones_like(asked)}
    ids = asked if isinstance(asked, Tensor) and asked.dim() == 2 and asked.shape[1] else None
    given_cache = rename_cache(kwargs, OF_GENERATE)
    supplies = given_cache is None and leaves_the_cache_to_kvkeep(model, args, kwargs)
    if supplies or isinstance(given_cache, Cache):
        require_one_text(kwargs)
    call = Call(model, ids, blocks)
    if isinstance(given_cache, Cache) and given_cache.fed:
        resume(model, given_cache)
    with (
        within(CALL, call),
        following_load() as call.adapt,
        supplying(model if supplies else None),
        _rows_restored(given_cache),
        layers_restored(model),
        prepared_by_peft(model, prepare_inputs),
        closing(call),
    ):
        output = type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
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
    arguments = generation_config, model_kwargs, generation_mode
    start = Start(model, in_force(model, settings), *arguments, max_cache_length)
    given = cache_in(model_kwargs)
    if isinstance(given, Cache):
        _take(start, given, batch_size)
    type(model)._prepare_cache_for_generation(  # type: ignore[attr-defined]
        model, *arguments, batch_size, max_cache_length
    )
    built = cache_in(model_kwargs)
    if given is None and type(built) is DynamicCache and not built.offloading:
        model_kwargs[OF_GENERATE] = _supply(start)
        return
    if given is None:
        require_supplied(model, built)
    if isinstance(given, Cache):
        _plan_steps(start, given)
    elif start.drafted and type(model)._is_stateful:
        raise UnsupportedError(
            f"drafts with a {type(built).__name__}, which cannot return the recurrent layers of "
            f"{type(model).__name__} to an earlier point; give a kvkeep.Cache, or neither a cache "
            "nor cache_implementation"
        )


def _take(start: Start, cache: Cache, rows: int) -> None:
    """Prepare the cache that a call of `rows` rows was given.

    Raises:
        UnsupportedError: it lacks a feature that the call demands.
        StateError: the prompt does not continue the tokens that the cache was fed.
    """
    _demands(start).require(cache)
    cache.written_out = _is_written_out(start)
    if cache.fed:
        all_given = _continue(start, cache)
        if start.drafted:
            _require_whole_text(cache, all_given=all_given)
        filling.activate_later(start.model, cache)
        if cache.rows == rows:
            _repeat(start, cache)
    if compresses(cache) and not start.drafting:
        filling.compress_prompt(start, cache)
    _chunk_prompt(start, cache.specs, cache.fed)
    _expect_fed(start, cache)
    if start.drafted:
        _record_after_prompt(start, cache)


def _supply(start: Start) -> Cache:
    """The cache of a call that was given none.

    Raises:
        UnsupportedError: a cache of the model's spec lacks a feature that the call demands.
    """
    model, spec, demands = start.model, start.settings.spec, _demands(start)
    if demands.drafts or demands.weights:
        demands.require(Cache(model, spec))
    kinds = layer_kinds(base_config(model))
    specs = per_layer(spec, kinds)
    _chunk_prompt(start, specs, 0)
    pairs = zip(specs, kinds, strict=True)
    compressing = any(one.policy.compression for one, kind in pairs if kind.window is None)
    if compressing and start.drafting:
        raise UnsupportedError("kvzip compresses no prompt of a draft model; use keep_all")
    # Prompt lookup may draft tokens beyond the maximum length. A draft model's length is known for
    # its first round only.
    most = start.columns + start.learned + (start.config.prompt_lookup_num_tokens or 0)
    empty = partial(Cache, model, spec, capacity=None if start.drafting else most)
    cache = None
    if not (demands.drafts or (start.config.token_healing and not compressing)):
        cache = filling.filled(start)
        if cache is None and not compressing:
            cache = filling.begun_alike(start)
    if cache is None and compressing:
        cache = empty()
        filling.compress_prompt(start, cache)
    if cache is not None:
        _repeat(start, cache)
    else:
        cache = empty()
        cache.activation = filling.invoked(start)
    cache.drafting = start.drafting
    if demands.drafts:
        _record_after_prompt(start, cache)
    if start.drafting:
        cache.activate_past_recording()
    cache.written_out = _is_written_out(start)
    _plan_steps(start, cache)
    _expect_fed(start, cache)
    return cache


def _demands(start: Start) -> Demands:
    """What a call demands of its cache."""
    return Demands(
        drafts=start.drafted or start.drafting,
        weights=bool(start.config.output_attentions),
        columns=start.columns + start.learned,
        routed=is_routed(decoder_config(base_config(start.model))),
    )


def _repeat(start: Start, cache: Cache) -> None:
    """Give each prompt in a cache its rows."""
    if start.several > 1:
        cache.freeze()
        cache.repeat(start.several)


def _is_written_out(start: Start) -> bool:
    """Whether a call needs what no graph computes, such as dropout."""
    asked = start.config.output_attentions or drops_weights(start.model)
    return bool(start.learned or asked)


def _plan_steps(start: Start, cache: Cache) -> None:
    """Let a call on a GPU replay its steps, if they can be. Warn where a call asks transformers
    to compile steps that it will not compile."""
    steps = getattr(start.model, ATTACHMENT, None)
    compiled = cache.is_compileable or (steps is not None and steps.compiled)
    if start.config.compile_config is not None and not compiled:
        specs = ", ".join(dict.fromkeys(map(str, cache.specs)))
        warnings.warn(
            f"compile_config compiles nothing with the cache {specs}, because transformers "
            "compiles steps only where slots have fixed addresses; use a spec with fixed "
            'storage, "...@fixed", or leave compile_config out and call '
            "kvkeep.attach(model, spec, compile=True)",
            stacklevel=2,
        )
    forward = start.model.__dict__.get("forward")
    if start.call is not None and isinstance(forward, Replaying):
        forward.plan(start.call, cache, start.config, start.mode, start.columns)


def _continue(start: Start, cache: Cache) -> bool:
    """Prepare a call whose cache holds tokens; whether its prompt is the whole text.

    Raises:
        StateError: the prompt does not continue the tokens that the cache was fed.
    """
    call, embedded = start.call, start.inputs.get("inputs_embeds")
    if call is None or start.learned:
        return True
    columns = call.columns if embedded is None else embedded.shape[1]
    whole = continuing.gives_whole_text(start.inputs, columns, start.config)
    if not (whole and columns):
        return whole
    if continuing.feeds_last_again(cache, columns):
        call.again, start.config.prefill_chunk_size = cache, None
    if call.rows is not None and embedded is None:
        continuing.require_same_beginning(cache, call.rows, start.inputs.get("attention_mask"))
    return True


def _expect_fed(start: Start, cache: Cache) -> None:
    """Note the tokens that a call will feed to its cache, if its token ids tell."""
    call = start.call
    if call is None or call.rows is None or start.learned or cache is call.moved:
        return
    if start.inputs.get("inputs_embeds") is None:
        whole = not cache.fed or continuing.gives_whole_text(
            start.inputs, call.columns, start.config
        )
        call.fed = continuing.Fed(cache, 0 if whole else cache.fed, start.mode)


def _record_after_prompt(start: Start, cache: Cache) -> None:
    """Let a cache that is going to record drafts read the prompt as without drafts.

    The first forward of a model that verifies drafts has the prompt and the first drafts. A
    draft model may be asked to take back the last token of the prompt too.
    """
    call = start.call
    if call is None:
        return
    cache.prompt = Prompt(max(0, call.columns - cache.drafting), start.config.prefill_chunk_size)
    if not cache.drafting:
        call.recording = cache


def _chunk_prompt(start: Start, specs: Sequence[CacheSpec], fed: int) -> None:
    """Make `generate` feed a long prompt in chunks if some layer has a budget, unless the call
    sets the chunk size; otherwise the cache would first hold the whole prompt.

    The prompt is not divided if the call returns outputs for the whole prompt or has inputs
    other than token ids, nor if `generate` compiles its steps, because it would compile one for
    each chunk length.
    """
    config, chunk = start.config, start.settings.prefill_chunk
    if chunk is None or start.config.prefill_chunk_size is not None:
        return
    if start.call is None or start.call.columns - fed <= chunk:
        return
    compiled = start.model.device.type != "cpu" or config.compile_config is not None
    if (
        any(spec.policy.evicts for spec in specs)
        and not start.learned
        and not brings_tensors(start.inputs, beside=_CUT_BY_COLUMNS)
        and not (config.output_hidden_states or config.output_attentions)
        and not (compiled and all(spec.storage.limited for spec in specs))
    ):
        config.prefill_chunk_size = chunk


def _require_whole_text(cache: Cache, *, all_given: bool) -> None:
    """Raise UnsupportedError if drafts could not be verified with a cache that holds tokens.
    `all_given`: the call gives these tokens too."""
    if cache.carried and any(layer.policy.evicts for layer in cache.layers):
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and the states that it carries could not return "
            "to that point after the first drafts if tokens were evicted since; use keep_all, give "
            "an empty cache, or do not draft"
        )
    if not all_given:
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and drafts are found in the whole text, but "
            "only new token ids are given; give all of them, those that the cache holds included"
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


def refuse_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Replaces an attached model's `init_continuous_batching`, which `generate_batch` calls.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"generate_batch of this {type(model).__name__} uses its own paged cache, not kvkeep's; "
        "call kvkeep.detach(model) first, or model.generate() with a batch"
    )
