"""TransformersHost: the host for models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature
from kvkeep.geometry import Geometry
from kvkeep.hf.attach import attach, compiled_steps, detach, unwrapped
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import base_config, changing_ropes, decoder_config, is_routed
from kvkeep.hf.forward.key_rotation import as_applied
from kvkeep.hf.forward.masks import MaskRequest, as_mask
from kvkeep.hf.forward.packed import (
    LaidCache,
    check_packed,
    numbers_up_to,
    require_packable,
    unpackable,
)
from kvkeep.hf.forward.placing import as_counted, first_position, placed, takes_positions
from kvkeep.hf.inputs import argument_names
from kvkeep.hf.kinds import kinds_of, layer_geometries, layer_kinds, require, why_not
from kvkeep.hf.kinds.multimodal import TEXT, require_counted, telling, why_not_counted
from kvkeep.hf.layerwise import Decoder
from kvkeep.hf.loading.fingerprint import activation_in, fingerprint
from kvkeep.hf.parallel import head_processes, is_parallel
from kvkeep.hf.rotary import require_same_frequencies, rotaries_of
from kvkeep.host import (
    Activation,
    Host,
    LayerKind,
    Layerwise,
    ModelCache,
    Narrowed,
    Piece,
    Specs,
    packed,
)
from kvkeep.host.adapters import activate
from kvkeep.host.cache import DEFAULT_SPEC
from kvkeep.host.progress import Progress, silent
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.recurrent import StateSpec
from kvkeep.rotary import Rotary


class TransformersHost(Host):
    """A transformers model, or a PEFT model around one."""

    library = "transformers"
    _skips_logits: bool | None = None  # whether its forwards can; None: not looked up yet

    # -- properties of the model ------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(_text_config(self.model).model_type)

    @property
    def kinds(self) -> list[LayerKind]:
        return layer_kinds(base_config(self.model))

    def geometries(self) -> list[Geometry]:
        return layer_geometries(base_config(self.model), head_processes(unwrapped(self.model)))

    @property
    def parallel(self) -> bool:
        return is_parallel(self.model)

    def rotaries(self, tokens: int | None = None) -> list[Rotary | None]:
        config = base_config(self.model)
        require(config, Feature.MOVED, "use it without policies and blocks that move keys")
        require_same_frequencies(config, tokens)
        model = unwrapped(self.model)
        if any(kind.placeless for kind in kinds_of(model)):  # keys are the same at any position
            return [Rotary(torch.empty(0))] * len(self.kinds)
        try:
            found = rotaries_of(config)
        except UnsupportedError:
            found = None
        in_part = any(kind.latent for kind in self.kinds)  # only an unknown part of a key rotates
        return as_applied(model, None if in_part else found)

    def recurrent_specs(self) -> dict[str, StateSpec]:
        model = unwrapped(self.model)
        specs = (kind.state_specs(model) for kind in kinds_of(model))
        return next(filter(None, specs), {})

    @property
    def changing_rotary(self) -> str:
        return next(iter(changing_ropes(base_config(self.model))), "")

    @property
    def context(self) -> int | None:
        text = _text_config(self.model)
        whole = getattr(text, "max_position_embeddings", None)
        whole = getattr(text, "max_target_positions", None) if whole is None else whole
        return None if whole is None else whole - first_position(unwrapped(self.model))

    @property
    def vocabulary(self) -> int:
        return int(_text_config(self.model).vocab_size)

    @property
    def embeddings(self) -> int | None:
        return getattr(self.model.get_input_embeddings(), "num_embeddings", None)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}

    def fingerprint(self, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
        return fingerprint(self.model, tokenizer, glance=glance)

    # -- attention through a cache ----------------------------------------------------------

    @property
    def attached(self) -> bool:
        return is_routed(_text_config(self.model))

    def attach(
        self, spec: Specs = DEFAULT_SPEC, *, linears: bool = True, compile: bool | None = None
    ) -> AbstractContextManager[object]:
        return attach(self.model, spec, linears=linears, compile=compile)

    @torch.inference_mode()
    def warm(self, spec: Specs, sequences: int, progress: Progress = silent) -> None:
        steps = compiled_steps(unwrapped(self.model))
        if steps is None or not steps.compile:
            return
        if sequences == 1:
            cache = self.new_cache(spec)
            for count in (2, 1):
                self.forward(torch.zeros(1, count, dtype=torch.int64), cache)
        if sequences == 1 or self.unpackable:
            return
        numbers = numbers_up_to(sequences)
        caches = [self.new_cache(spec) for _ in range(numbers[-1])]
        token = torch.zeros(1, dtype=torch.int64)
        self.forward_packed([Piece(token.repeat(2), cache) for cache in caches])
        for done, number in enumerate(numbers):
            progress(f"compiling steps of {number}", done / len(numbers))
            self.forward_packed([Piece(token, cache) for cache in caches[:number]])

    def detach(self) -> None:
        detach(self.model)

    def new_cache(self, spec: Specs = DEFAULT_SPEC, *, capacity: int | None = None) -> Cache:
        return Cache(self.model, spec, capacity=capacity)

    def forward(
        self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None, last: int = 1
    ) -> Tensor:
        options = _keeping(self, last)
        output = _run(self.model, self.model, ids, cache, position, options)
        logits: Tensor = output.logits[:, -last:]
        return logits

    def read(self, ids: Tensor, cache: ModelCache, media: Mapping[str, Tensor]) -> Tensor:
        if "pixel_values" not in argument_names(self.model):
            return super().read(ids, cache, media)
        options = _keeping(self, 1)
        for name, x in media.items():
            x = x[:, : ids.shape[1]] if name in TEXT else x
            options[name] = x.to(self.device, self.model.dtype if x.is_floating_point() else None)
        logits: Tensor = _run(self.model, self.model, ids, cache, None, options).logits[:, -1:]
        return logits

    def feed(self, ids: Tensor, cache: ModelCache, *, position: Tensor | None = None) -> None:
        # A model that contains the decoder may count positions in another way than the decoder.
        model = unwrapped(self.model)
        alone = why_not_counted(model, cache) == "" and not first_position(model)
        module = self.model.get_decoder() if alone else self.model
        _run(self.model, module, ids, cache, position, {})

    # -- several sequences in one forward ---------------------------------------------------

    @property
    def unpackable(self) -> str:
        return unpackable(unwrapped(self.model))

    def forward_packed(self, pieces: Sequence[Piece]) -> Tensor:
        model = unwrapped(self.model)
        require_packable(model, [piece.cache for piece in pieces])
        check_packed(model, pieces)
        with packed(pieces, self.device) as all_tokens:
            compiled = compiled_steps(model) if takes_positions(model) else None
            found = None if compiled is None else compiled.run_packed(all_tokens)
            if found is not None:
                return found
            ids, position, last = all_tokens[:3]
            model_layers = cast(Cache, pieces[0].cache).model_layers
            cache = LaidCache(all_tokens.layers, model_layers, all_tokens.states)
            options = _keeping(self, last)
            with placed(position):
                output = self.model(
                    input_ids=ids,
                    position_ids=as_counted(model, position),
                    use_cache=True,
                    **as_cache(model, cache),
                    **options,
                )
            cache.require_attended()
            logits: Tensor = output.logits[0]
        return logits if options else logits[last]

    def feed_layers(self, ids: Tensor, position: Tensor, layers: Sequence[AttendingLayer]) -> None:
        require(base_config(self.model), Feature.REREAD, "use a policy that reads a text once")
        model = unwrapped(self.model)
        require_packable(model, ())
        decoder = self.model.get_decoder()
        decoder(
            input_ids=ids[None],
            position_ids=as_counted(model, position[None].to(ids.device)),
            use_cache=True,
            **as_cache(decoder, LaidCache(layers, self.new_cache().model_layers)),
        )

    # -- adapters ---------------------------------------------------------------------------

    def activation_in(self, prompt: Tensor) -> Activation | None:
        return activation_in(self.model, prompt)

    # -- some tokens of a forward -----------------------------------------------------------

    @property
    def narrows(self) -> bool:
        return bool(_stack(self.model)) and not why_not(
            kinds_of(base_config(self.model)), Feature.NARROWED
        )

    @contextmanager
    def narrowed(self, first: int, tokens: int, chosen: Callable[[], Narrowed]) -> Iterator[None]:
        thread = get_ident()

        # If another thread removes the hook during a forward, torch calls it without kwargs.
        def narrow(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
        ) -> Any:
            if get_ident() != thread or kwargs is None:  # another forward of this model
                return None
            indices, positions = chosen()

            def some(x: Any) -> Any:
                if isinstance(x, tuple):
                    return tuple(map(some, x))
                asked: MaskRequest | None = getattr(x, "kvkeep", None)
                if asked is not None:
                    until = None if asked.until is None else asked.until[..., indices]
                    return as_mask(positions.to(torch.int32), asked.window, until)
                if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == tokens:
                    return x[:, indices]
                return x

            return some(args), {name: some(x) for name, x in kwargs.items()}

        with ExitStack() as hooks:
            for layer in _stack(self.model)[first:]:
                hooks.enter_context(layer.register_forward_pre_hook(narrow, with_kwargs=True))
            yield

    # -- training --------------------------------------------------------------------------

    def layerwise(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Layerwise:
        return Decoder(self.model, input_ids, attention_mask)


def _text_config(model: Any) -> PreTrainedConfig:
    return decoder_config(base_config(model))


def _keeping(host: TransformersHost, last: int | Tensor) -> dict[str, Any]:
    """The argument by which a forward computes only some logits, if it has one."""
    if host._skips_logits is None:
        host._skips_logits = "logits_to_keep" in argument_names(host.model)
    return {"logits_to_keep": last} if host._skips_logits else {}


def _run(
    model: Any,
    module: Any,
    ids: Tensor,
    cache: ModelCache,
    position: Tensor | None,
    options: dict[str, Any],
) -> Any:
    """The output of `module`, which is `model` or its decoder, for ids (B, n)."""
    at = torch.arange(cache.fed, cache.fed + ids.shape[1])
    if position is not None:
        require(base_config(model), Feature.PLACED, "feed the whole text")
        own = unwrapped(model)
        require_counted(own, cache, "blocks of text")
        at = position
        # An attached model's mask function returns positions; give its result as the mask.
        options["attention_mask"] = as_mask(position.to(torch.int32), None)
        options["position_ids"] = as_counted(own, position[None].to(ids.device))
    try:
        activate(model, cache.activation, at)
        with telling(media=False):
            given = as_cache(module, cache)
            return module(input_ids=ids, **given, use_cache=True, **options)
    finally:  # so that the adapter takes no part in later forwards
        activate(model, None, at)


def _stack(model: Any) -> list[nn.Module]:
    """The decoder's layers; empty if it has no list of layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []
