"""attach and detach: opt a transformers model in to kvkeep, and out again."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.hf.adapters import activated, names_adapters
from kvkeep.hf.attention import attention_over
from kvkeep.hf.cache import DEFAULT_SPEC, Cache
from kvkeep.hf.config import ATTENTION_PREFIX, decoder_config, is_latent, is_routed
from kvkeep.hf.masks import mask_over
from kvkeep.hf.recompute import RECOMPUTE, Recompute, parsed
from kvkeep.hf.specs import Specs

_ATTRIBUTE = "_kvkeep_attachment"
_DRAFTING = ("assistant_model", "prompt_lookup_num_tokens")


class PromptStore(Protocol):
    """What `generate` asks of a store, such as `kvkeep.PrefixStore`."""

    def prefill(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        *,
        spec: Specs,
        namespace: str,
        chunk: int | None,
    ) -> Cache:
        """A cache of all tokens (n,) but the last."""

    def learn(self, model: PreTrainedModel, tokens: Tensor, cache: Cache, *, namespace: str) -> int:
        """Keep what a cache was fed, tokens (n,); how many of them are kept."""


@runtime_checkable
class BlockPrompt(Protocol):
    """What `generate` asks of a prompt with blocks, such as `kvkeep.blocks.Encoded`."""

    input_ids: Tensor

    def prefill(
        self,
        model: PreTrainedModel,
        *,
        store: Any,
        recompute: Recompute,
        spec: Specs,
        namespace: str,
    ) -> tuple[Cache, Any]:
        """A cache of all tokens but the last, and a report."""


@dataclass(frozen=True, repr=False)
class Attachment:
    """What `attach` did to a model. As a context manager it detaches on exit.

    `layers` counts the layers whose cache is kvkeep's; `attention` those whose attention runs on
    it too (none for a latent cache, which the model expands itself).
    """

    model: PreTrainedModel
    spec: Specs
    layers: int
    attention: int
    original: str
    store: PromptStore | None
    namespace: str
    recompute: Recompute
    _hook: RemovableHandle

    def __str__(self) -> str:
        name = type(self.model).__name__
        return f"kvkeep: {self.layers} layers of {name}, attention of {self.attention}, {self.spec}"

    __repr__ = __str__

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        detach(self.model)


def attach(
    model: PreTrainedModel,
    spec: Specs = DEFAULT_SPEC,
    *,
    store: PromptStore | None = None,
    namespace: str = "",
    recompute: Recompute = RECOMPUTE,
) -> Attachment:
    """Let `model` use kvkeep: `generate()` and cached forwards then build a kvkeep cache.

    Changes this model only: its attention implementation, one forward hook and the cache that
    `generate` builds. Training forwards, and caches that are not kvkeep's, run as before.

    Args:
        model: a decoder, or a model with one inside; a PEFT model is unwrapped.
        spec: what caches built for it keep; see `kvkeep.Cache`.
        store: where `generate()` finds what prompts began with before, and keeps what it computed;
            see `kvkeep.PrefixStore`. For one prompt at a time, without a cache of your own.
        namespace: of the store's entries: those of another one are never found.
        recompute: how many tokens of blocks `generate()` computes again, where it is given a
            prompt with blocks in place of token ids; see `kvkeep.blocks`.

    Returns:
        What was done; also a context manager.

    Raises:
        StateError: the model is attached already.
        UnsupportedError: the model's attention or layers cannot be served; it is left as it was.
        SpecError: the spec does not exist or does not fit the model; or a `recompute` that does not
            exist.
    """
    parsed(recompute)
    model = unwrapped(model)
    text = decoder_config(model.config)
    for part in (model, _decoder(model)):
        if hasattr(part, _ATTRIBUTE):
            raise StateError(
                f"this {type(part).__name__} is attached; call kvkeep.detach(model) first"
            )
    if is_routed(text):
        raise StateError(
            f"this {type(model).__name__} shares its config with an attached model; give each "
            "model a config of its own, copy.deepcopy(config)"
        )
    layers = len(Cache(model, spec))
    original = text._attn_implementation
    latent = is_latent(model.config)
    if not latent:
        # transformers takes a name with "flash" in it for a kernel to be imported.
        _route(model, ATTENTION_PREFIX + original.replace("flash", "fa"), original)
    hook = _decoder(model).register_forward_pre_hook(_supply_cache, with_kwargs=True)
    _decoder(model).__dict__[_ATTRIBUTE] = model.__dict__[_ATTRIBUTE] = attachment = Attachment(
        model, spec, layers, 0 if latent else layers, original, store, namespace, recompute, hook
    )
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = partial(_prepare_cache, model)
        model.__dict__["generate"] = partial(_generate, model)
    return attachment


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`.

    Raises:
        StateError: the model is not attached.
    """
    model = unwrapped(model)
    attachment: Attachment | None = getattr(model, _ATTRIBUTE, None)
    if attachment is None:
        raise StateError(f"this {type(model).__name__} is not attached; call kvkeep.attach(model)")
    attachment._hook.remove()
    if attachment.attention:
        _set_attention(model, attachment.original)
    for owner in (model, _decoder(model)):
        owner.__dict__.pop(_ATTRIBUTE, None)
    model.__dict__.pop("_prepare_cache_for_generation", None)
    model.__dict__.pop("generate", None)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model itself, of a PEFT model."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model; attach the model inside it, or "
            "build kvkeep.LayerCache objects for your own loop"
        )
    return model


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that builds a cache of its own when it is given none."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = model.base_model
    return cast(PreTrainedModel, decoder)


def _route(model: PreTrainedModel, name: str, original: str) -> None:
    """Send the decoder's attention through kvkeep, or leave the model as it was and raise."""
    family = type(model).__name__
    if not model._can_set_attn_implementation() or not _decoder(model)._supports_attention_backend:
        raise UnsupportedError(
            f"kvkeep cannot attach {family}: its attention does not go through transformers' "
            "AttentionInterface; pass kvkeep.Cache(model) to it unattached"
        )
    AttentionInterface.register(name, attention_over(original))
    AttentionMaskInterface.register(name, mask_over(original))
    _set_attention(model, name)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of the decoder's config, and of no other part's."""
    text = decoder_config(model.config)
    parts = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def _generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`generate`, with what the store has of the prompt. A cache that it was given is left as it
    was if nothing is fed to it."""
    asked = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if isinstance(asked, BlockPrompt):
        return _generate_from_blocks(model, asked, *args[1:], **kwargs)
    ids = _stored_prompt(model, *args, **kwargs)
    if ids is not None:
        return _generate_from_store(model, ids, *args, **kwargs)
    given = kwargs.get("past_key_values")
    cache = given if isinstance(given, Cache) and given.fed else None
    before = None if cache is None else (cache.fed, cache.rows)
    try:
        with activated(model, None if cache is None else cache.takeover):
            return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
    except BaseException:
        if cache is not None and before is not None:
            fed, rows = before
            if cache.fed == fed and cache.rows > rows:
                cache.select(torch.arange(0, cache.rows, cache.rows // rows))
        raise


def _stored_prompt(
    model: PreTrainedModel, inputs: Any = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """The prompt, (1, n), if a store can help with it."""
    attachment: Attachment = getattr(model, _ATTRIBUTE)
    ids = kwargs.get("input_ids") if inputs is None else inputs
    mask = kwargs.get("attention_mask")
    others = ("past_key_values", "inputs_embeds", "pixel_values", *_DRAFTING)
    config = kwargs.get("generation_config") or model.generation_config
    if (
        attachment.store is None
        or not isinstance(ids, Tensor)
        or ids.dim() != 2
        or ids.shape[0] != 1
        or not ids.shape[1]
        or kwargs.get("use_cache") is False
        or names_adapters(model)
        or config.prompt_lookup_num_tokens
        or (isinstance(mask, Tensor) and not bool(mask.all()))
        or any(kwargs.get(name) is not None for name in others)
    ):
        return None
    return ids


def _generate_from_store(model: PreTrainedModel, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    attachment: Attachment = getattr(model, _ATTRIBUTE)
    store, namespace = attachment.store, attachment.namespace
    assert store is not None
    chunk = kwargs.get("prefill_chunk_size")
    cache = store.prefill(model, ids[0], spec=attachment.spec, namespace=namespace, chunk=chunk)
    return _continued(model, cache, *args, **kwargs)


def _generate_from_blocks(
    model: PreTrainedModel, prompt: BlockPrompt, *args: Any, **kwargs: Any
) -> Any:
    attachment: Attachment = getattr(model, _ATTRIBUTE)
    given = [name for name in ("past_key_values", "attention_mask") if kwargs.get(name) is not None]
    if given or kwargs.get("use_cache") is False:
        raise StateError(
            f"a prompt with blocks brings its own {[*given, 'use_cache'][0]}; leave that out"
        )
    cache, _ = prompt.prefill(
        model,
        store=attachment.store,
        recompute=attachment.recompute,
        spec=attachment.spec,
        namespace=attachment.namespace,
    )
    ids = prompt.input_ids.to(model.device)
    kwargs = {name: x for name, x in kwargs.items() if name not in ("inputs", "input_ids")}
    kwargs["attention_mask"] = torch.ones_like(ids)
    return _continued(model, cache, ids, *args, **kwargs)


def _continued(model: PreTrainedModel, cache: Cache, *args: Any, **kwargs: Any) -> Any:
    """`generate` with a cache of the prompt; the store, if there is one, learns the answer."""
    attachment: Attachment = getattr(model, _ATTRIBUTE)
    kwargs["past_key_values"] = cache
    with activated(model, cache.takeover):
        output = type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]
    said = output if isinstance(output, Tensor) else output.sequences
    if cache.rows == 1 and attachment.store is not None:
        attachment.store.learn(model, said[0, : cache.fed], cache, namespace=attachment.namespace)
    return output


def _prepare_cache(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """`generate`'s own way to a cache, with kvkeep's in place of a DynamicCache it would build.

    A kvkeep cache that holds a prompt gets the rows that beams or several answers need, which share
    what it holds.
    """
    given = model_kwargs.get("past_key_values")
    if isinstance(given, Cache) and given.fed:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise UnsupportedError(
                f"this cache holds {given.fed} tokens, and where tokens are drafted transformers "
                "feeds the whole prompt to it again; give an empty cache, or do not draft"
            )
        several = max(generation_config.num_beams, generation_config.num_return_sequences)
        if several > 1 and given.rows == batch_size:
            given.freeze()
            given.repeat(several)
    type(model)._prepare_cache_for_generation(  # type: ignore[attr-defined]
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    built = model_kwargs.get("past_key_values")
    if given is None and type(built) is DynamicCache and not built.offloading:
        attachment: Attachment = getattr(model, _ATTRIBUTE)
        drafting = bool(generation_config.is_assistant)
        # A draft's length is known for its first round only; lookup may overshoot the end.
        most = max_cache_length + (generation_config.prompt_lookup_num_tokens or 0)
        cache = Cache(model, attachment.spec, capacity=None if drafting else most)
        cache.drafting = drafting
        if drafting:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache


def _supply_cache(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A cached forward without a cache gets kvkeep's; one that it could not serve is left alone."""
    if kwargs.get("past_key_values") is not None or torch.is_grad_enabled() or decoder.training:
        return None
    given = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})

    def wants(option: str) -> bool:
        choice = given.get(option)
        return bool(getattr(decoder.config, option) if choice is None else choice)

    mask = given.get("attention_mask")
    if (
        not wants("use_cache")
        or wants("output_attentions")
        or given.get("past_key_values") is not None
        or not (mask is None or (isinstance(mask, Tensor) and mask.dim() <= 2))
    ):
        return None
    attachment: Attachment = getattr(decoder, _ATTRIBUTE)
    kwargs["past_key_values"] = Cache(attachment.model, attachment.spec)
    return args, kwargs
