"""An attached model's `generate()`: supply a kvkeep cache, and use a store."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.blocks.recompute_option import Recompute
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import (
    NAMES,
    OF_GENERATE,
    cache_in,
    cache_name,
    name_in,
    rename_cache,
)
from kvkeep.hf.config import (
    ATTACHMENT,
    base_config,
    decoder_config,
    is_latent,
    is_routed,
    layer_kinds,
)
from kvkeep.hf.continuing import (
    Fed,
    feeds_last_again,
    gives_whole_text,
    require_same_beginning,
)
from kvkeep.hf.demands import Demands
from kvkeep.hf.drafts import layers_restored
from kvkeep.hf.fingerprint import activation_in
from kvkeep.hf.inputs import check_learned_prefix, check_rows
from kvkeep.hf.multimodal import holds_tensors, resume
from kvkeep.hf.packed_rows import require_one_text
from kvkeep.hf.unserved import leaves_the_cache_to_kvkeep, require_supplied, supplying
from kvkeep.hf.weights import drops_weights
from kvkeep.host import Activation, ModelCache, Specs, host_of, per_layer
from kvkeep.host.adapters import learns_prompts, names_adapters
from kvkeep.host.compress import compresses, read
from kvkeep.host.hooks import foreign_hooks
from kvkeep.layer.history import Prompt
from kvkeep.policy import KVzip
from kvkeep.spec import CacheSpec

PREFILL_CHUNK = 1024
"""Tokens of a prompt that `generate` feeds at once to a cache with a budget."""


class PromptStore(Protocol):
    """The interface of a store that `generate` uses, such as `kvkeep.PrefixStore`."""

    def prefill(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        *,
        spec: Specs,
        namespace: str,
        chunk: int | None,
        capacity: int | None,
    ) -> ModelCache:
        """A cache that holds all tokens (n,) but the last."""

    def prefill_rows(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Tensor],
        *,
        spec: Specs,
        namespace: str,
        chunk: int | None,
        capacity: int | None,
    ) -> ModelCache | None:
        """A cache with a row for each prompt (n,), of the tokens with which all begin; None: there
        are too few."""

    def learn(
        self, model: PreTrainedModel, tokens: Tensor, cache: ModelCache, *, namespace: str
    ) -> int:
        """Store the tokens (n,) that a cache was fed; returns how many of them are stored."""


@runtime_checkable
class BlockPrompt(Protocol):
    """The interface of a prompt with blocks that `generate` uses, such as
    `kvkeep.blocks.Encoded`."""

    input_ids: Tensor

    def prefill(
        self,
        model: PreTrainedModel,
        *,
        store: Any,
        recompute: Recompute,
        spec: Specs,
        namespace: str,
        capacity: int | None,
    ) -> tuple[ModelCache, Any]:
        """A cache that holds all tokens but the last, and a report."""


@dataclass(frozen=True)
class Settings:
    """The arguments with which a model was attached: see `kvkeep.attach`."""

    spec: Specs
    store: PromptStore | None
    namespace: str
    recompute: Recompute
    prefill_chunk: int | None


@dataclass
class _Call:
    """A call of a model's `generate()`: the columns of its prompt, the prompt (1, n) if it has one
    row, the prompt with blocks if there is one, the token ids of all rows (B, n), the cache from a
    store or blocks, if any, the cache that records drafts, if any, the cache whose columns are
    others than those of the token ids, if any, and the cache whose last token is fed again, if any.
    `fed` is what the call feeds, if that is known."""

    model: PreTrainedModel
    columns: int
    ids: Tensor | None
    blocks: BlockPrompt | None
    rows: Tensor | None
    cache: Cache | None = None
    recording: Cache | None = None
    moved: Cache | None = None
    again: Cache | None = None
    fed: Fed | None = None


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)
_OTHER: ContextVar[tuple[PreTrainedModel, Settings] | None] = ContextVar("other", default=None)
_OF_A_PROMPT = (*NAMES, "attention_mask", "position_ids", "inputs_embeds")
_OF_TEXT = ("attention_mask", "position_ids", "mm_token_type_ids")
_CUT_BY_COLUMNS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""The tensors that transformers divides into chunks along with the token ids."""


@contextmanager
def settings_of_calls(model: PreTrainedModel, settings: Settings) -> Iterator[None]:
    """Within this context, calls of an attached model's `generate()` use other settings than those
    with which it was attached. Tasks and threads that are started in it inherit them."""
    token = _OTHER.set((model, settings))
    try:
        yield
    finally:
        _OTHER.reset(token)


def _in_force(model: PreTrainedModel, settings: Settings) -> Settings:
    other = _OTHER.get()
    return other[1] if other is not None and other[0] is model else settings


def generate(model: PreTrainedModel, settings: Settings, *args: Any, **kwargs: Any) -> Any:
    """The model's `generate`, which looks up the prompt's prefix in the store and stores the
    result. If it raises before anything is fed to a given cache, the cache's rows are restored."""
    settings = _in_force(model, settings)
    check_learned_prefix(model)
    asked = args[0] if args else kwargs.get("inputs")
    asked = kwargs.get("input_ids") if asked is None else asked
    blocks = asked if isinstance(asked, BlockPrompt) else None
    check_rows({**kwargs, "inputs": args[0]} if args else kwargs)
    if blocks is not None:
        given = [name for name in _OF_A_PROMPT if kwargs.get(name) is not None]
        if given:
            raise StateError(f"a prompt with blocks has its own {given[0]}; leave it out")
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
    call = _Call(model, columns, one, blocks, ids)
    token = _CALL.set(call)
    if isinstance(given_cache, Cache) and given_cache.fed:
        resume(model, given_cache)
    try:
        with (
            supplying(model if supplies else None),
            _rows_restored(given_cache),
            layers_restored(model),
        ):
            output = type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
    finally:
        _CALL.reset(token)
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
    """In place of the model's own method: `generate` gets a kvkeep cache where it would build a
    DynamicCache.

    The rows of a kvkeep cache that holds a prompt are repeated as beams or several answers need;
    they share its slots.
    """
    settings = _in_force(model, settings)
    several = max(generation_config.num_beams, generation_config.num_return_sequences)
    drafted = generation_mode == GenerationMode.ASSISTED_GENERATION
    drafting = bool(generation_config.is_assistant)
    given = cache_in(model_kwargs)
    demands = Demands(
        drafts=drafted or drafting,
        weights=bool(generation_config.output_attentions),
        columns=max_cache_length,
        routed=is_routed(decoder_config(base_config(model))),
        latent=is_latent(base_config(model)),
    )
    if isinstance(given, Cache):
        demands.require(given)
        given.written_out = demands.weights or drops_weights(model)
    if isinstance(given, Cache) and given.fed:
        all_given = _continue(model, generation_config, model_kwargs, given)
        if drafted:
            _require_whole_text(given, all_given=all_given)
        _activate_later(model, given)
        if several > 1 and given.rows == batch_size:
            given.freeze()
            given.repeat(several)
    if isinstance(given, Cache) and compresses(given) and not drafting:
        _compress(model, model_kwargs, given, generation_config.prefill_chunk_size)
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
            _tell_if_not_compiled(model, generation_config, given)
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
    most = max_cache_length + (generation_config.prompt_lookup_num_tokens or 0)
    whole = [spec for spec, kind in zip(specs, kinds, strict=True) if kind.window is None]
    if any(isinstance(spec.policy, KVzip) for spec in whole):
        if drafting:
            raise UnsupportedError("kvzip compresses no prompt of a draft model; use keep_all")
        cache = None if drafted else _filled(model, settings, model_kwargs, chunk, max_cache_length)
        if cache is None:
            cache = Cache(model, settings.spec, capacity=most)
            _compress(model, model_kwargs, cache, chunk)
    elif not (drafting or drafted or generation_config.token_healing):
        cache = _filled(model, settings, model_kwargs, chunk, max_cache_length)
        if cache is None:
            cache = _begun_alike(model, settings, model_kwargs, several, chunk, max_cache_length)
    if cache is not None and several > 1:
        cache.freeze()
        cache.repeat(several)
    if cache is None:
        # A draft model's length is known for its first round only.
        cache = Cache(model, settings.spec, capacity=None if drafting else most)
        cache.activation = _invoked(model)
    cache.drafting = drafting
    if drafted or drafting:
        _record_after_prompt(model, cache, chunk)
    if drafting:
        cache.activate_past_recording()
    cache.written_out = demands.weights or drops_weights(model)
    _tell_if_not_compiled(model, generation_config, cache)
    model_kwargs[OF_GENERATE] = cache
    _expect_fed(model, cache, generation_config, generation_mode, model_kwargs)


def _tell_if_not_compiled(model: PreTrainedModel, generation_config: Any, cache: Cache) -> None:
    """Warn where a call asks transformers to compile steps that it will not compile."""
    asked, steps = generation_config.compile_config, getattr(model, ATTACHMENT, None)
    if asked is None or cache.is_compileable or (steps is not None and steps.compiled):
        return
    specs = ", ".join(dict.fromkeys(map(str, cache.specs)))
    warnings.warn(
        f"compile_config compiles nothing with the cache {specs}, because transformers compiles "
        'steps only where slots have fixed addresses; use a spec with fixed storage, "...@fixed", '
        "or leave compile_config out and call kvkeep.attach(model, spec, compile=True)",
        stacklevel=2,
    )


def prepare_inputs(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> dict[str, Any]:
    """In place of the model's own `prepare_inputs_for_generation`: the first forward of a call with
    drafts, for which transformers gives the whole text, feeds what the cache does not hold; and
    that of a text which the cache holds already feeds the last token again."""
    owner: Any = type(model)
    owner = owner.prepare_inputs_for_generation
    call, cache = _CALL.get(), rename_cache(options, name_in(owner) or OF_GENERATE)
    if call is not None and call.again is not None and call.again is cache:
        call.again = None
        cache.crop(-1)
        options["next_sequence_length"] = None if call.recording is cache else 1
    if call is not None and call.recording is not None and call.recording is cache and cache.fed:
        options["next_sequence_length"] = (
            options.get("next_sequence_length") or input_ids.shape[1] - cache.fed
        )
    inputs: dict[str, Any] = owner(model, input_ids, **options)
    rename_cache(inputs, cache_name(model))
    return inputs


def _continue(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], cache: Cache
) -> bool:
    """Prepare a call whose cache holds tokens; whether its prompt is the whole text.

    Raises:
        StateError: the prompt does not continue what the cache holds.
    """
    call, embedded = _CALL.get(), model_kwargs.get("inputs_embeds")
    if call is None or call.model is not model or learns_prompts(model):
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
    """Note what a call will feed to its cache, if its token ids tell."""
    call = _CALL.get()
    if call is None or call.model is not model or call.rows is None or learns_prompts(model):
        return
    if model_kwargs.get("inputs_embeds") is not None or cache is call.moved:
        return
    whole = not cache.fed or gives_whole_text(model_kwargs, call.columns, generation_config)
    call.fed = Fed(cache, 0 if whole else cache.fed, mode)


def _require_whole_text(cache: Cache, *, all_given: bool) -> None:
    """Raise UnsupportedError if drafts could not be verified with a cache that holds tokens.
    `all_given`: the call gives these tokens too."""
    if cache.recurrent is not None and any(layer.policy.evicts for layer in cache.layers):
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and recurrent layers could not return to that "
            "point after the first drafts if tokens were evicted since; use keep_all, give an "
            "empty cache, or do not draft"
        )
    if not all_given:
        raise UnsupportedError(
            f"this cache holds {cache.fed} tokens, and drafts are found in the whole text, but "
            "only new token ids are given; give all of them, those that the cache holds included"
        )


def _require_returning(model: PreTrainedModel, cache: Any) -> None:
    """Raise UnsupportedError if drafts that a cache reads could not be taken back."""
    if type(model)._is_stateful and not isinstance(cache, Cache):
        raise UnsupportedError(
            f"drafts with a {type(cache).__name__}, which cannot return the recurrent layers of "
            f"{type(model).__name__} to an earlier point; give a kvkeep.Cache, or neither a cache "
            "nor cache_implementation"
        )


def _record_after_prompt(model: PreTrainedModel, cache: Cache, chunk: int | None) -> None:
    """Let a cache that is going to record drafts read the prompt as without drafts.

    The first forward of a model that verifies drafts has the prompt and the first drafts. A draft
    model may be asked to take back the last token of the prompt too.
    """
    call = _CALL.get()
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
    """Make `generate` feed a long prompt in chunks if some layer has a budget, unless the call sets
    the chunk size; otherwise the cache would first hold the whole prompt.

    The prompt is not divided if the call returns outputs for the whole prompt or has inputs other
    than token ids, nor if `generate` compiles its steps, because it would compile one for each
    chunk length.
    """
    call, chunk = _CALL.get(), settings.prefill_chunk
    if chunk is None or generation_config.prefill_chunk_size is not None:
        return
    if call is None or call.model is not model or call.columns - fed <= chunk:
        return
    compiled = model.device.type != "cpu" or generation_config.compile_config is not None
    if (
        not any(spec.policy.evicts for spec in specs)
        or _brings_tensors(model_kwargs, beside=_CUT_BY_COLUMNS)
        or generation_config.output_hidden_states
        or generation_config.output_attentions
        or (compiled and all(spec.storage.limited for spec in specs))
    ):
        return
    generation_config.prefill_chunk_size = chunk


def _brings_tensors(model_kwargs: dict[str, Any], *, beside: Sequence[str]) -> bool:
    """Whether a call has other tensors than those in `beside`, such as images, or the features that
    transformers computed from them before it asked for a cache."""
    return any(holds_tensors(x) for name, x in model_kwargs.items() if name not in beside)


def refuse_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """In place of an attached model's `init_continuous_batching`, which `generate_batch` calls.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"generate_batch of this {type(model).__name__} uses a paged cache of its own, not "
        "kvkeep's; call kvkeep.detach(model) before it, or model.generate() with a batch"
    )


def _activate_later(model: PreTrainedModel, cache: Cache) -> None:
    """Set the cache's activation if the prompt invokes an activated adapter after the tokens that
    the cache holds."""
    call = _CALL.get()
    if cache.activation is not None and call is not None and call.ids is not None:
        found = activation_in(model, call.ids[0].cpu())
        if found is not None and found.start >= cache.fed:
            cache.activation = found


def _invoked(model: PreTrainedModel) -> Activation | None:
    """Where an activated adapter starts to compute in the current call's prompt, if it has one row.
    None leaves that to PEFT, which tells only a model that is in a `PeftModel`."""
    call = _CALL.get()
    if call is None or call.model is not model or call.ids is None or names_adapters(model):
        return None
    with suppress(UnsupportedError):  # other adapters are active beside it
        return activation_in(model, call.ids[0].cpu())
    return None


def _filled(
    model: PreTrainedModel,
    settings: Settings,
    model_kwargs: dict[str, Any],
    chunk: int | None,
    capacity: int,
) -> Cache | None:
    """A cache that holds the prompt but its last token, from the store or from blocks; None if they
    would not give the result of a plain `generate`."""
    call = _plain_call(model, model_kwargs)
    if call is None or call.ids is None or (settings.store is None and call.blocks is None):
        return None
    options: dict[str, Any] = {"spec": settings.spec, "namespace": settings.namespace}
    filled: Any = None
    try:
        if call.blocks is not None:
            options |= {"store": settings.store, "recompute": settings.recompute}
            filled, _ = call.blocks.prefill(model, capacity=capacity, **options)
        elif settings.store is not None:
            filled = settings.store.prefill(
                model, call.ids[0], chunk=chunk, capacity=capacity, **options
            )
    except UnsupportedError as error:
        _tell_of_hooks(model, error)
        return None
    call.cache = filled
    return call.cache


def _tell_of_hooks(model: PreTrainedModel, error: UnsupportedError) -> None:
    """Say, once, that hooks keep a model from its store; other reasons are in the documents."""
    if foreign_hooks(model):
        warnings.warn(f"this prompt is computed without the store: {error}", stacklevel=2)


def _begun_alike(
    model: PreTrainedModel,
    settings: Settings,
    model_kwargs: dict[str, Any],
    several: int,
    chunk: int | None,
    capacity: int,
) -> Cache | None:
    """A cache that holds the tokens with which all rows of the prompt begin, from the store; None
    if it serves no row, or would not give the result of a plain `generate`.

    Columns before a row's first token move behind those tokens, where the mask names them as
    padding: the cache has the same tokens in all rows, and each column keeps its token.
    """
    call, mask = _CALL.get(), model_kwargs.get("attention_mask")
    if call is None or call.rows is None or settings.store is None:
        return None
    if not _is_plain(model, call, model_kwargs):
        return None
    ids = call.rows.cpu()
    columns = torch.arange(ids.shape[1])
    real = torch.ones_like(ids) if mask is None else mask[::several].cpu().long()
    pads = (1 - real).sum(dim=1, keepdim=True)
    if real.shape != ids.shape or not real.equal((columns >= pads).long()):
        return None  # padded on the right, or within
    place = model_kwargs.get("position_ids")
    if (
        place is not None
        and not (place.cpu() == _counted(real).repeat_interleave(several, 0)).all()
    ):
        return None
    try:
        cache: Any = settings.store.prefill_rows(
            model,
            [row[pad:] for row, pad in zip(ids, pads.flatten().tolist(), strict=True)],
            spec=settings.spec,
            namespace=settings.namespace,
            chunk=chunk,
            capacity=capacity,
        )
    except ShapeError:
        return None
    except UnsupportedError as error:
        _tell_of_hooks(model, error)
        return None
    found: Cache | None = cache
    if found is None or mask is None:
        return found
    if found.recurrent is not None:  # padding behind tokens would change its states
        return None
    call.moved = found
    for layer in found.layers:
        if layer.holes_after is not None:
            layer.holes_after = found.fed  # what follows stands for padding in front
    real = ((columns < found.fed) | (columns >= found.fed + pads)).long()
    real = real.repeat_interleave(several, dim=0)
    model_kwargs["attention_mask"] = real.to(mask)
    if place is not None:
        model_kwargs["position_ids"] = _counted(real).to(place)
    return found


def _counted(real: Tensor) -> Tensor:
    """Positions of columns, (B, n), as transformers counts them where a mask is given."""
    return (real.cumsum(dim=1) - 1).masked_fill(real == 0, 0)


def _compress(
    model: PreTrainedModel, model_kwargs: dict[str, Any], cache: Cache, chunk: int | None
) -> None:
    """Read the prompt but its last token, and compress it.

    Raises:
        UnsupportedError: the call's prompt is not one row of token ids without padding.
    """
    call = _plain_call(model, model_kwargs)
    if call is None or call.ids is None:
        raise UnsupportedError(
            "kvzip compresses a prompt of token ids in one row, without padding; give such a "
            "prompt, or a cache that compress() was called on"
        )
    if call.ids.shape[1] > 1:
        read(host_of(model), cache, call.ids[:, :-1], chunk)


def _plain_call(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> _Call | None:
    """The current call, if its prompt may be read outside of `generate`: one row of token ids, with
    nothing else that changes the result."""
    call = _CALL.get()
    if call is None or call.ids is None or not _is_plain(model, call, model_kwargs):
        return None
    place = model_kwargs.get("position_ids")
    if model_kwargs.get("attention_mask") is not None:  # a mask of ones was removed before
        return None
    return call if place is None or _counts(place, call.ids.shape[1]) else None


def _is_plain(model: PreTrainedModel, call: _Call, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call is one of this model, and nothing but its token ids, their mask and their
    positions changes the result."""
    types = model_kwargs.get("mm_token_type_ids")
    return call.model is model and not (
        _brings_tensors(model_kwargs, beside=_OF_TEXT)
        or (types is not None and bool(types.any()))  # 0: a token of text
        or model.training
        or names_adapters(model)
        or learns_prompts(model)
    )


def _counts(place: Tensor, tokens: int) -> bool:
    """Whether positions (B, n), or (parts, B, n), are 0, 1, 2, ..."""
    counted = torch.arange(tokens, device=place.device)
    return place.shape[-1] == tokens and bool((place == counted).all())
