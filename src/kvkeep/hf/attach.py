"""attach and detach: make a transformers model use kvkeep, and undo it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from kvkeep.arguments import suggests
from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.errors import SpecError, StateError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import cache_in, cache_name, rename_cache
from kvkeep.hf.config import ATTACHMENT, decoder_config, decoder_of, is_routed
from kvkeep.hf.demands import require_exact
from kvkeep.hf.forward.checkpointing import pause, resume
from kvkeep.hf.forward.experts import route_experts
from kvkeep.hf.forward.inline import is_inline, route_inline
from kvkeep.hf.forward.packed_rows import require_one_text
from kvkeep.hf.forward.rehearsal import rehearse, rehearse_own
from kvkeep.hf.forward.routing import registered, route_attention, unroute_attention
from kvkeep.hf.forward.unserved import not_served, require_supplied
from kvkeep.hf.forward.weights import ask_for_weights
from kvkeep.hf.generation.calls import PREFILL_CHUNK, PromptStore, Settings
from kvkeep.hf.generation.generate_hook import (
    generate,
    prepare_cache,
    prepare_inputs,
    refuse_batching,
)
from kvkeep.hf.generation.replaying import Replaying, replays
from kvkeep.hf.inputs import (
    arguments_of,
    check_fed,
    check_mask,
    check_rows,
    fed_by,
)
from kvkeep.hf.kinds import kinds_of, require
from kvkeep.hf.kinds.base import Handle
from kvkeep.hf.kinds.multimodal import note_fed, reach_decoder, require_placed, watch
from kvkeep.hf.steps.compiled import CompiledSteps
from kvkeep.hf.steps.replaced_forward import ReplacedForward
from kvkeep.hf.steps.step import programs_of
from kvkeep.host import Host, Specs, host_of
from kvkeep.host.adapters import activate, deactivate
from kvkeep.host.cache import DEFAULT_SPEC
from kvkeep.linears import route, unroute

_METHODS = ("generate", "prepare_inputs_for_generation", "init_continuous_batching")
"""The methods of a model that `attach` replaces."""


@dataclass(frozen=True, repr=False)
class Attachment:
    """The result of `attach`. As a context manager it detaches the model on exit.

    Attributes:
        model: the attached model.
        spec: the spec of caches built for it.
        layers: number of layers with a kvkeep cache.
        attention: number of layers whose attention kvkeep computes, including layers that share
            another layer's slots; either all or 0. If 0, the model computes attention itself, over
            all keys and values, so its caches must be exact, such as "keep_all+int8".
        own: why the model computes attention itself; empty if kvkeep does.
        store, namespace, recompute: the arguments of `attach`.
        linears: number of linear layers that kvkeep's kernel computes where it is faster.
        compiled: whether steps of one token run in a compiled program.
        cache_name: the name of the cache argument of the decoder's forward.
        changes: the changes of the model that `detach` removes.
    """

    model: PreTrainedModel
    spec: Specs
    layers: int
    attention: int
    own: str
    store: PromptStore | None
    namespace: str
    recompute: Recompute
    linears: int
    compiled: bool
    cache_name: str
    changes: tuple[Handle, ...]

    def __str__(self) -> str:
        attention = (
            f"its own attention ({self.own})" if self.own else f"attention of {self.attention}"
        )
        return (
            f"kvkeep: {self.layers} layers of {type(self.model).__name__}, {attention}, {self.spec}"
        )

    __repr__ = __str__

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        detach(self.model)


@suggests(Cache)
def attach(
    model: PreTrainedModel,
    spec: Specs = DEFAULT_SPEC,
    *,
    store: PromptStore | None = None,
    namespace: str = "",
    recompute: Recompute = RECOMPUTE,
    prefill_chunk: int | None = PREFILL_CHUNK,
    linears: bool = True,
    compile: bool | None = None,
) -> Attachment:
    """Make `model` use kvkeep: `generate()` and cached forwards then build a kvkeep cache.

    Changes this model only, until `detach`: its attention implementation, hooks of its forward,
    `generate` and the methods that it calls, and forwards of linear layers, experts and recurrent
    layers. Training forwards, and forwards with caches that are not kvkeep's, run as before, up to
    rounding.

    Args:
        model: a decoder, or a model that contains one; a PEFT model is unwrapped. A model of
            another library is attached by that library's host, with `spec`, `linears` and `compile`
            as the only options; see `kvkeep.litgpt.attach.attach`.
        spec: the spec of caches built for the model; see `kvkeep.Cache`.
        store: the store in which `generate()` looks up prefixes of prompts, and to which it adds
            the texts that it computes; see `kvkeep.PrefixStore`. It is used for single prompts
            without a cache of your own.
        namespace: namespace of the store's entries; entries of other namespaces are never found.
        recompute: which tokens of blocks `generate()` recomputes when it is given a prompt with
            blocks instead of token ids; see `kvkeep.blocks`.
        prefill_chunk: tokens of a prompt that `generate()` feeds at once if the spec has a budget,
            so that the cache never holds all of a long prompt; None: the whole prompt. The argument
            `prefill_chunk_size` of a call takes precedence.
        linears: let kvkeep's kernel compute the model's linear layers if it is faster: on the CPU,
            without gradients, for at most 32 rows (tokens of all texts), or for any number if torch
            has no fast product of the dtype (bfloat16 without AVX-512, float16 without
            AVX512_FP16), or as `kvkeep doctor --measure` measured. If torch has no fast product of
            the dtype, it multiplies the weights of experts too. The weights are not copied; results
            differ from torch's by rounding only. False: never.
        compile: run steps of one token a row, without padding, in a compiled program. torch
            compiles it in the first step, which takes about a minute; it is kept on disk for later
            processes ($KVKEEP_STEPS, or `steps` in kvkeep's directory). On the CPU, kvkeep's kernel
            computes its linear layers. Attributes of modules must not be changed while the model is
            attached. Results differ from uncompiled steps by rounding. None: only if an earlier
            process has compiled the steps of such a model, and it has no PEFT adapters. False:
            never.

    Returns:
        A description of the attached model, which is also a context manager.

    Raises:
        StateError: the model is already attached.
        UnsupportedError: kvkeep does not support the model's attention or layers; the model is
            unchanged.
        SpecError: the spec does not exist or does not fit the model, or `recompute` or
            `prefill_chunk` is invalid.
    """
    other = _other_host(model)
    if other is not None:
        if store is not None:
            raise UnsupportedError(
                f"a model of {other.library} takes no store when it is attached; read prompts with "
                "store.read(model, ids), and set the attachment's cache"
            )
        return cast(Attachment, other.attach(spec, linears=linears, compile=compile))
    parsed(recompute)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise SpecError(
            f"prefill_chunk {prefill_chunk}: give at least 1 token, or None to feed whole prompts"
        )
    model = unwrapped(model)
    text = decoder_config(model.config)
    _require_detached(model)
    if compile:
        require(text, Feature.COMPILED, "attach the model without compile=True")
    empty = Cache(model, spec)
    layers = len(empty.layers)
    attending = sum(1 + layer.cursor.readers for layer in empty.layers)
    original = text._attn_implementation
    decoder = decoder_of(model)
    implementation, own = _routing(model, original, untried=not empty.why_not(Feature.UNTRIED))
    if own:
        require_exact(empty, text.model_type, own)
    if own and compile:
        raise UnsupportedError(
            f"kvkeep cannot compile the steps of {text.model_type}: it computes attention itself, "
            f"because {own}; attach it without compile=True"
        )
    able = linears and not own and not empty.why_not(Feature.COMPILED)
    compiled = bool(compile) or (compile is None and able and bool(programs_of(model)))
    of_kinds = [change for kind in empty.kinds for change in kind.attach(model)]
    if implementation is not None:
        route_attention(model, implementation)
        of_kinds += route_inline(decoder, implementation)
    if linears:
        of_kinds += route_experts(decoder)
    changes = (
        decoder.register_forward_pre_hook(_supply_cache, with_kwargs=True),
        decoder.register_forward_hook(_require_attended, with_kwargs=True),
        *watch(model),
        *of_kinds,
    )
    decoder.__dict__[ATTACHMENT] = model.__dict__[ATTACHMENT] = attachment = Attachment(
        model,
        spec,
        layers,
        0 if own else attending,
        own,
        store,
        namespace,
        recompute,
        route(model) if linears else 0,
        compiled,
        cache_name(decoder),
        changes,
    )
    if hasattr(model, "_prepare_cache_for_generation"):
        _replace_generate(model, Settings(spec, store, namespace, recompute, prefill_chunk))
    if compiled:
        model.__dict__["forward"] = CompiledSteps(model, bool(compile))
    elif compile is None and not own and replays(model):
        model.__dict__["forward"] = Replaying(model)
    return attachment


def _require_detached(model: PreTrainedModel) -> None:
    for part in (model, decoder_of(model)):
        if hasattr(part, ATTACHMENT):
            raise StateError(
                f"this {type(part).__name__} is attached already; call kvkeep.detach(model) first"
            )


def _replace_generate(model: PreTrainedModel, settings: Settings) -> None:
    """Let `generate()`, and the methods that it calls, use kvkeep's caches."""
    for part in _generating(model):
        part.__dict__["_prepare_cache_for_generation"] = partial(prepare_cache, part, settings)
        if all(kind.returns_cache for kind in kinds_of(model)):
            # transformers refuses drafts with recurrent layers; kvkeep's caches can remove them
            part.__dict__["_is_stateful"] = False
    model.__dict__["generate"] = partial(generate, model, settings)
    before: Any = model.prepare_inputs_for_generation
    inputs = update_wrapper(partial(prepare_inputs, model), before)  # its signature is read
    model.__dict__["prepare_inputs_for_generation"] = inputs
    model.__dict__["init_continuous_batching"] = partial(refuse_batching, model)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`.

    Raises:
        StateError: the model is not attached.
    """
    other = _other_host(model)
    if other is not None:
        other.detach()
        return
    model = unwrapped(model)
    attachment: Attachment | None = getattr(model, ATTACHMENT, None)
    if attachment is None:
        raise StateError(
            f"this {type(model).__name__} is not attached, so there is nothing to detach; leave "
            "out this call"
        )
    for change in reversed(attachment.changes):
        change.remove()
    unroute_attention(model)
    if attachment.linears:
        unroute(model)
    if isinstance(model.__dict__.get("forward"), ReplacedForward):
        del model.__dict__["forward"]
    for owner in (model, decoder_of(model)):
        owner.__dict__.pop(ATTACHMENT, None)
    for name in _METHODS:
        model.__dict__.pop(name, None)
    for part in _generating(model):
        for name in ("_prepare_cache_for_generation", "_is_stateful"):
            part.__dict__.pop(name, None)
    resume(decoder_of(model))
    deactivate(model)


def _other_host(model: Any) -> Host | None:
    """The host of a model of another library; None: transformers, or unknown."""
    try:
        host = host_of(model)
    except UnsupportedError:
        return None
    return None if host.library == "transformers" else host


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model itself, taken out of a PEFT model."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model; attach the model inside it, or "
            "build kvkeep.LayerCache objects for your own loop"
        )
    return model


def _generating(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model, and parts of it whose `generate()` runs the same decoder: a model with images may
    call its language model's `generate()`."""
    decoder = decoder_of(model)
    parts: list[Any] = [part for part in model.modules() if isinstance(part, GenerationMixin)]
    return [part for part in parts if decoder in (part, decoder_of(part))]


def compiled_steps(model: PreTrainedModel) -> CompiledSteps | None:
    """The forward of an attached model with compiled steps; None: its steps are not compiled."""
    attachment: Attachment | None = getattr(model, ATTACHMENT, None)
    return model.__dict__.get("forward") if attachment and attachment.compiled else None


def _routing(model: PreTrainedModel, original: str, *, untried: bool) -> tuple[str | None, str]:
    """Choose who computes the attention of a model whose implementation was `original`: the name of
    kvkeep's implementation, and ""; or None, and why the model keeps its own attention.

    Args:
        untried: whether kvkeep may compute the attention of a model that cannot be rehearsed. If it
            does not work, the first forward raises.

    Raises:
        UnsupportedError: in rehearsals, the model raises or computes wrong results with a kvkeep
            cache, both with kvkeep's attention and with its own.
    """
    decoder = decoder_of(model)
    never = "".join(kind.own for kind in kinds_of(decoder))
    why = never or "its attention does not go through transformers' AttentionInterface"
    inline = is_inline(decoder)
    if not never and (inline or decoder._can_set_attn_implementation()):
        name = registered(original)
        fault = rehearse(decoder, name)
        tagged = inline or decoder._supports_attention_backend
        if fault == "" or (fault is None and untried and tagged):
            return name, ""
        why = "its attention cannot be tried without weights" if fault is None else fault
    if fault := rehearse_own(decoder):
        raise UnsupportedError(
            f"kvkeep cannot attach {type(model).__name__}: {why}, and with its own attention "
            f"{fault}; use transformers' own cache for it"
        )
    return None, why


def attach_routed(model: PreTrainedModel, purpose: str) -> Attachment:
    """`attach` an unattached model for a purpose that needs kvkeep's attention.

    Raises:
        UnsupportedError: the model computes attention itself, or cannot be attached.
    """
    given: Attachment | None = getattr(model, ATTACHMENT, None)
    attachment = given or attach(model, linears=False)
    if attachment.own:
        if given is None:
            detach(model)
        raise UnsupportedError(
            f"{purpose} needs kvkeep's attention, but {type(model).__name__} computes attention "
            f"itself, because {attachment.own}; use it without kvkeep for this"
        )
    return attachment


def _supply_cache(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward hook: supply a kvkeep cache to a cached forward without a cache, if kvkeep supports
    the forward; check the arguments; and tell an activated adapter which tokens to compute."""
    attachment: Attachment = getattr(decoder, ATTACHMENT)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        resume(decoder)
        reach_decoder()
        args, kwargs = (), arguments_of(decoder, args, kwargs) if args else kwargs
        check_rows(kwargs)
    cache = rename_cache(kwargs, attachment.cache_name)
    if not compiling:
        require_supplied(attachment.model, cache)
        _activate(decoder, cache, kwargs)
    if isinstance(cache, Cache):
        _begin(decoder, cache, kwargs)
    elif cache is None and not torch.is_grad_enabled() and not decoder.training:
        _begin_with_new_cache(decoder, args, kwargs)
    return args, kwargs


def _begin_with_new_cache(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Supply a kvkeep cache to a forward, if it is cached and kvkeep supports it."""
    attachment: Attachment = getattr(decoder, ATTACHMENT)
    given = arguments_of(decoder, args, kwargs)

    def wants(option: str) -> bool:
        choice = given.get(option)
        return bool(getattr(decoder.config, option) if choice is None else choice)

    mask = given.get("attention_mask")
    if (
        not wants("use_cache")
        or cache_in(given) is not None
        or not (mask is None or (isinstance(mask, Tensor) and mask.dim() <= 2))
    ):
        return
    kwargs[attachment.cache_name] = made = Cache(attachment.model, attachment.spec)
    _begin(decoder, made, kwargs)


def _begin(decoder: PreTrainedModel, cache: Cache, given: dict[str, Any]) -> None:
    """Check the arguments of a forward, and begin it."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        attachment: Attachment = getattr(decoder, ATTACHMENT)
        fed, tokens = cache.fed, fed_by(given)
        if not is_routed(cache.config):  # the cache may have been built before `attach`
            cache.follow(decoder_config(decoder.config))
        if attachment.own:
            require_exact(cache, decoder_config(decoder.config).model_type, attachment.own)
        else:
            check_mask(decoder, given)
        pause(decoder)
        check_fed(decoder, given, fed)
        require_one_text(given)
        cache.forget_unused()
        require_placed(cache, given)
        on_device = cache.tickets[0].on_device
        cache.awaited = None if tokens is None or on_device else fed + tokens.shape[1]
    ask_for_weights(decoder, cache, given)
    for kind in cache.kinds:
        if compiling:
            kind.begin_in_graph(cache, given)
        else:
            kind.begin(cache, decoder, given)


def _require_attended(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook: raise if the model's attention did not use the keys in its cache; record inputs
    other than token ids."""
    cache = cache_in(kwargs)
    if isinstance(cache, Cache) and not torch.compiler.is_compiling():
        resume(decoder)
        if cache.awaited not in (None, cache.fed):
            raise not_served(
                decoder, f"its cache holds {cache.fed} tokens, but {cache.awaited} were fed"
            )
        cache.end_forward()
        note_fed(cache, kwargs)


def _activate(decoder: PreTrainedModel, cache: Any, given: dict[str, Any]) -> None:
    position = given.get("position_ids")
    activation = cache.activation if isinstance(cache, Cache) else None
    if activation is None or position is None:
        tokens = fed_by(given)
        n = 0 if tokens is None else tokens.shape[1]
        start = cache.fed if isinstance(cache, Cache) else 0
        position = torch.arange(start, start + n)[None]
    activate(decoder, activation, position[0])
