"""attach and detach: opt a transformers model in to kvkeep, and out again."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.errors import SpecError, StateError, UnsupportedError
from kvkeep.hf.attention import attention_over
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import ATTENTION_PREFIX, decoder_config, is_latent, is_routed
from kvkeep.hf.generate_hook import (
    PREFILL_CHUNK,
    PromptStore,
    Settings,
    generate,
    prepare_cache,
    refuse_batching,
)
from kvkeep.hf.inputs import check_fed
from kvkeep.hf.masks import mask_over
from kvkeep.hf.rehearsal import rehearse, serves_unattached
from kvkeep.hf.weights import ask_for_weights
from kvkeep.host import Specs
from kvkeep.host.adapters import activate, deactivate
from kvkeep.host.cache import DEFAULT_SPEC

_ATTRIBUTE = "_kvkeep_attachment"


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
    _hooks: tuple[RemovableHandle, ...]

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
    prefill_chunk: int | None = PREFILL_CHUNK,
) -> Attachment:
    """Let `model` use kvkeep: `generate()` and cached forwards then build a kvkeep cache.

    Changes this model only: its attention implementation, two forward hooks and the cache that
    `generate` builds. Training forwards, and caches that are not kvkeep's, run as before.

    Args:
        model: a decoder, or a model with one inside; a PEFT model is unwrapped.
        spec: what caches built for it keep; see `kvkeep.Cache`.
        store: where `generate()` finds what prompts began with before, and keeps what it computed;
            see `kvkeep.PrefixStore`. For one prompt at a time, without a cache of your own.
        namespace: of the store's entries: those of another one are never found.
        recompute: how many tokens of blocks `generate()` computes again, where it is given a
            prompt with blocks in place of token ids; see `kvkeep.blocks`.
        prefill_chunk: how many tokens of a prompt `generate()` feeds at once where the spec has a
            budget, so that the cache never holds a long prompt whole; None: all. A call's own
            `prefill_chunk_size` goes before it.

    Returns:
        What was done; also a context manager.

    Raises:
        StateError: the model is attached already.
        UnsupportedError: the model's attention or layers cannot be served; it is left as it was.
        SpecError: the spec does not exist or does not fit the model; or a `recompute` or
            `prefill_chunk` that does not exist.
    """
    parsed(recompute)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise SpecError(
            f"prefill_chunk {prefill_chunk}: give at least 1 token, or None to feed prompts whole"
        )
    model = unwrapped(model)
    text = decoder_config(model.config)
    for part in (model, decoder_of(model)):
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
    implementation = None if latent else _registered(model, original)
    _require_fit(model, implementation)
    if implementation is not None:
        _set_attention(model, implementation)
    decoder = decoder_of(model)
    hooks = (
        decoder.register_forward_pre_hook(_supply_cache, with_kwargs=True),
        decoder.register_forward_hook(_require_attended, with_kwargs=True),
    )
    decoder.__dict__[_ATTRIBUTE] = model.__dict__[_ATTRIBUTE] = attachment = Attachment(
        model, spec, layers, 0 if latent else layers, original, store, namespace, recompute, hooks
    )
    if hasattr(model, "_prepare_cache_for_generation"):
        settings = Settings(spec, store, namespace, recompute, prefill_chunk)
        model.__dict__["_prepare_cache_for_generation"] = partial(prepare_cache, model, settings)
        model.__dict__["generate"] = partial(generate, model, settings)
        model.__dict__["init_continuous_batching"] = partial(refuse_batching, model)
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
    for hook in attachment._hooks:
        hook.remove()
    if attachment.attention:
        _set_attention(model, attachment.original)
    for owner in (model, decoder_of(model)):
        owner.__dict__.pop(_ATTRIBUTE, None)
    for name in ("_prepare_cache_for_generation", "generate", "init_continuous_batching"):
        model.__dict__.pop(name, None)
    deactivate(model)


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


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that builds a cache of its own when it is given none."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = model.base_model
    return cast(PreTrainedModel, decoder)


def _registered(model: PreTrainedModel, original: str) -> str:
    """The name under which transformers knows kvkeep's attention for a model that had `original`.

    Raises:
        UnsupportedError: the model does not ask transformers for its attention.
    """
    if (
        not model._can_set_attn_implementation()
        or not decoder_of(model)._supports_attention_backend
    ):
        raise UnsupportedError(
            f"kvkeep cannot attach {type(model).__name__}: its attention does not go through "
            "transformers' AttentionInterface; pass kvkeep.Cache(model) to it unattached"
        )
    # transformers takes a name with "flash" in it for a kernel to be imported.
    name = ATTENTION_PREFIX + original.replace("flash", "fa")
    AttentionInterface.register(name, attention_over(original))
    AttentionMaskInterface.register(name, mask_over(original))
    return name


def _require_fit(model: PreTrainedModel, implementation: str | None) -> None:
    """Raise UnsupportedError if a rehearsal shows that the model's forward would be refused or
    wrong on a kvkeep cache."""
    decoder = decoder_of(model)
    fault = rehearse(decoder, implementation)
    if fault:
        raise UnsupportedError(
            f"kvkeep cannot attach {type(model).__name__}: {fault}; "
            + (
                "pass kvkeep.Cache(model) to it unattached"
                if serves_unattached(decoder)
                else "use transformers' own cache for it"
            )
        )


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of the decoder's config, and of no other part's."""
    text = decoder_config(model.config)
    parts = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def _supply_cache(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A cached forward without a cache gets kvkeep's; one that it could not serve is left alone. An
    activated adapter takes over where the cache says."""
    if not torch.compiler.is_compiling():
        _activate(decoder, args, kwargs)
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and not torch.compiler.is_compiling():
        check_fed(decoder, args, kwargs, cache.fed)
    ask_for_weights(decoder, kwargs)
    if cache is not None or torch.is_grad_enabled() or decoder.training:
        return None
    given = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})

    def wants(option: str) -> bool:
        choice = given.get(option)
        return bool(getattr(decoder.config, option) if choice is None else choice)

    mask = given.get("attention_mask")
    if (
        not wants("use_cache")
        or given.get("past_key_values") is not None
        or not (mask is None or (isinstance(mask, Tensor) and mask.dim() <= 2))
    ):
        return None
    attachment: Attachment = getattr(decoder, _ATTRIBUTE)
    if not torch.compiler.is_compiling():
        check_fed(decoder, args, kwargs, 0)
    kwargs["past_key_values"] = Cache(attachment.model, attachment.spec)
    ask_for_weights(decoder, kwargs)
    return args, kwargs


def _require_attended(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """No forward returns what its cache did not take part in."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and not torch.compiler.is_compiling():
        cache.require_attended()


def _activate(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache, position = kwargs.get("past_key_values"), kwargs.get("position_ids")
    activation = cache.activation if isinstance(cache, Cache) else None
    if activation is None or position is None:
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        n = 0 if given is None else given.shape[1]
        start = cache.fed if isinstance(cache, Cache) else 0
        position = torch.arange(start, start + n)[None]
    activate(decoder, activation, position[0])
