"""Runs a transformers decoder layer by layer.

To find the computation before and after a model's layers, the model runs with stubs in place of the
layers. The stubs also show whether it computes anything between its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf.attach import attach, attach_routed, unwrapped
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import ATTACHMENT, decoder_config, decoder_of, is_routed, layer_lists
from kvkeep.hf.handover import Handed
from kvkeep.hf.inputs import check_tokens
from kvkeep.hf.interface.layers_cache import LayersCache
from kvkeep.hf.interface.model_layers import ModelLayers
from kvkeep.hf.kinds import PassedStates, kinds_of, layer_kinds, require
from kvkeep.host import LayerKind
from kvkeep.host.layerwise import Carries, ChunkStep, Embedded, LayerStep, Layerwise
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.history import History
from kvkeep.layer.recurrent import NoStates
from kvkeep.layer.sight import Sighted
from kvkeep.layer.step import StepInputs, require_causal


class Call(NamedTuple):
    """The arguments that a model passes to a layer, except the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Decoder(Layerwise):
    """A transformers model run layer by layer. Inside the context it is attached.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one.
        input_ids: token ids (B, T).
        attention_mask: (B, T), 0 for padding; None: there is none.

    Raises:
        UnsupportedError: the model cannot be run layer by layer.
        StateError: gradient checkpointing is on.
        ShapeError: a token id is outside the vocabulary.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        _require_trainable_adapters(model)
        inner = unwrapped(model)
        _require_layerwise(inner)
        self._base, self.decoder = inner, decoder_of(inner)
        text, attending = decoder_config(inner.config), layer_kinds(inner.config)
        self._kinds = kinds_of(text)
        self._modules = _layers_of(self.decoder, _count(text, attending))
        check_tokens(inner, input_ids)
        vocabulary: int = text.vocab_size
        layers = [layer for layer in self._modules._modules.values() if layer is not None]
        super().__init__(inner, input_ids, attention_mask, layers=layers, vocabulary=vocabulary)
        states = next(filter(None, (kind.states(text) for kind in self._kinds)), NoStates())
        told = ModelLayers.of(attending, states.places, len(layers))
        self._cache = _TextCache(self, attending, told)
        reads = {at: of for kind in self._kinds for at, of in kind.reads(text).items()}
        slots = {kind.place: at for at, kind in enumerate(attending) if not kind.counts}
        self.carries = [
            Carries(slots.get(reads.get(at, at)), reads.get(at), at in states.places)
            for at in range(len(layers))
        ]
        self._tuples = False  # whether the model takes the hidden states from tuples
        self._attachment: Any = None

    def __enter__(self) -> Self:
        self._reshard()
        attends = all(kind.attends for kind in self._kinds)
        if attends and not is_routed(decoder_config(self._base.config)):
            self._attachment = attach_routed(self._base, "the gradient of a text")
        elif not hasattr(self.decoder, ATTACHMENT):
            self._attachment = attach(self._base, linears=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._attachment is not None:
            self._attachment.__exit__(*error)
        self._reshard()

    def _reshard(self) -> None:
        """Shard parameters again, as between forwards, because FSDP2 adds gradients to shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def embed(self, columns: slice) -> Embedded:
        try:
            return self._embedded(columns)
        except (UnsupportedError, ValueError) as error:
            if self._tuples:
                raise
            self._tuples = True  # older models use the first element of a layer's result
            try:
                return self._embedded(columns)
            except Exception as second:
                self._tuples = False
                ours = isinstance(second, UnsupportedError)
                raise (
                    second if ours and not isinstance(error, UnsupportedError) else error
                ) from None

    def _embedded(self, columns: slice) -> Embedded:
        first: list[Tensor] = []
        calls: list[Call] = []

        def layer(index: int, hidden: Tensor, call: Call) -> Tensor:
            if first and hidden is not first[0]:
                raise self._refused("does something between its layers")
            call = self._handing(call, None)
            if any(isinstance(x, _Second) for x in tree_leaves(call)):
                raise self._refused("passes more than hidden states from layer to layer")
            first.append(hidden)
            calls.append(call)
            return hidden

        output = self._forward(columns, layer, last=True)
        if len(calls) != len(self.layers):
            raise self._refused(f"runs {len(calls)} of its {len(self.layers)} layers")
        outputs = (output[0],) if isinstance(self.model, FSDPModule) else ()
        return Embedded(first[0], list(calls), outputs)

    def layer(
        self, index: int, columns: slice, hidden: Tensor, call: Call, step: ChunkStep
    ) -> Tensor:
        module, carries = self.layers[index], self.carries[index]
        self._cache.seek(columns.start)
        with self._cache.running(carries, step) as handed:
            args, given = self._handing(call, step.shared)
            out = module(hidden, *args, **given)
            if [one.taken for one in handed] != [True] * (carries.slots is not None):
                raise self._refused(
                    "has a layer that does not attend once to the keys that it gives to its cache"
                )
        if self._tuples and isinstance(out, tuple):
            out = out[0]
        if not isinstance(out, Tensor):
            raise self._refused("has layers that return more than hidden states")
        return out

    def _handing(self, call: Call, shared: tuple[Tensor, Tensor] | None) -> Call:
        for kind in self._kinds:
            call = call._replace(kwargs=kind.handing(call.kwargs, shared))
        return call

    def _refused(self, clause: str) -> UnsupportedError:
        return _refused(self._base, clause)

    def hidden(self, columns: slice, output: Tensor) -> Tensor:
        found: list[Tensor] = []

        def keep(module: nn.Module, args: Any, result: Any) -> None:
            found.append(result[0])

        with self.decoder.register_forward_hook(keep):
            self._forward(columns, self._returning(output), last=True)
        return found[-1]

    def logits(self, columns: slice, output: Tensor) -> Tensor:
        logits = getattr(self._forward(columns, self._returning(output)), "logits", None)
        shape = len(self.input_ids), columns.stop - columns.start
        if logits is None or logits.shape[:2] != shape:
            raise UnsupportedError(
                f"{type(self.model).__name__} has no logits for each token; give a head, a "
                "function of hidden states"
            )
        return cast(Tensor, logits)

    def _returning(self, output: Tensor) -> Callable[[int, Tensor, Call], Tensor]:
        """A stub for all layers: each returns its input, and the last one returns `output`."""
        last = len(self.layers) - 1
        return lambda index, given, call: output if index == last else given

    def _forward(
        self, columns: slice, layer: Callable[[int, Tensor, Call], Tensor], last: bool = False
    ) -> Any:
        """Run the whole model with `layer` in place of each layer. `last`: only the last token's
        logits are needed."""
        options: dict[str, Any] = {}
        model, ids, mask = self.model, self.input_ids[:, columns], self.attention_mask
        narrows = any(kind.narrows for kind in self._kinds)
        if last and narrows and not isinstance(model, FSDPModule):
            model = self.decoder  # it computes no logits
        if "logits_to_keep" in inspect.signature(model.forward).parameters and (last or narrows):
            options["logits_to_keep"] = torch.arange(ids.shape[1]) if narrows else 1
        for kind in self._kinds:
            kind.place(options, ids, columns.start)
        self._cache.seek(columns.start)
        with _stubs(self._modules, layer, tuples=self._tuples):
            return model(
                input_ids=ids,
                attention_mask=None if mask is None else mask[:, : columns.stop],
                use_cache=True,
                **as_cache(model, self._cache),
                **options,
            )


def _count(text: Any, attending: Sequence[LayerKind]) -> int:
    """The number of a model's layers."""
    names = getattr(text, "layer_types", None)
    return len(attending) if names is None else len(names)


def _require_trainable_adapters(model: Any) -> None:
    """Raise UnsupportedError for PEFT adapters that need PEFT's own forward, which does not run."""
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        raise UnsupportedError(
            "an activated LoRA is switched on within a text by PEFT's own forward, which does not "
            "run here; train it with PEFT"
        )
    prompts = [adapter for adapter in adapters if adapter.is_prompt_learning]
    if prompts:
        raise UnsupportedError(
            f"{prompts[0].peft_type} puts learned tokens before a text, outside of the model; "
            "train LoRA or the model's own weights"
        )


def _require_layerwise(model: Any) -> None:
    """Raise UnsupportedError or StateError if running the model layer by layer would omit some of
    its computation."""
    require(model, Feature.TRAINED, "train it without kvkeep")
    if getattr(decoder_config(model.config), "output_router_logits", False):
        raise UnsupportedError(
            "the model's config asks for router logits, for an auxiliary loss that is not "
            "computed here; set output_router_logits=False (TRL: router_aux_loss_coef=0.0)"
        )
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise StateError(
            "the model has gradient checkpointing enabled, which is not needed here; call "
            "model.gradient_checkpointing_disable(), or give a trainer's arguments "
            "gradient_checkpointing=False"
        )


def _layers_of(decoder: nn.Module, count: int) -> nn.ModuleList:
    # A tower for images may have as many layers, but they are not numbered.
    found = sorted(layer_lists(decoder, count), key=_is_unnumbered)
    if not found:
        raise _refused(decoder, f"has no list of its {count} layers")
    return found[0]


def _is_unnumbered(layers: nn.ModuleList) -> bool:
    """Whether no module of the layers knows its layer's index in a cache."""
    return not any(hasattr(module, "layer_idx") for module in layers.modules())


def _refused(model: Any, clause: str) -> UnsupportedError:
    """The error for a model that cannot be run layer by layer."""
    name = decoder_config(model.config).model_type
    return UnsupportedError(
        f"{name} {clause}, so gradients through a cache cannot be computed; train it without kvkeep"
    )


class _Second:
    """The second element of a stub's result, for models that use only the first."""


class _Stub(nn.Module):
    """Takes the place of a layer. All attributes are the layer's, because models read some."""

    def __init__(self, layer: nn.Module, run: Callable[[Tensor, Call], Any]) -> None:
        super().__init__()
        self.__dict__["_layer"], self.__dict__["_run"] = layer, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](hidden_states, Call(args, kwargs))


@contextmanager
def _stubs(
    layers: nn.ModuleList, run: Callable[[int, Tensor, Call], Tensor], *, tuples: bool
) -> Iterator[None]:
    modules, before = layers._modules, dict(layers._modules)
    if any(isinstance(layer, _Stub) for layer in before.values()):
        raise StateError("another thread is training this model; give each thread its own model")
    try:
        for index, (name, layer) in enumerate(before.items()):
            assert layer is not None

            def one(hidden: Tensor, call: Call, index: int = index) -> Any:
                result = run(index, hidden, call)
                return (result, _Second()) if tuples else result

            modules[name] = _Stub(layer, one)
        yield
    finally:
        modules.update(before)


class _TextLayer(AttendingLayer):
    """A layer at some column of a text. It has no slots; a `LayerStep` computes its attention."""

    def __init__(self, text: Layerwise, history: History, kind: LayerKind) -> None:
        self._text, self.history = text, history
        self.window = kind.window
        self.attention: LayerStep | None = None

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        return self.history.next_positions(n, device, real)

    def positions(self) -> Tensor:
        before = self._text.positions(slice(0, self.fed))
        return before.expand(len(self._text.input_ids), -1)[:, None]

    def sighted(self, queries: Tensor) -> Sighted:
        step: Any = self.attention  # a step of `kvkeep.train`
        return cast(Sighted, step.sighted(queries))

    def run(self, inputs: StepInputs) -> Tensor:
        assert self.attention is not None
        require_causal(inputs)
        return self.attention.run(inputs)


class _TextCache(LayersCache):
    """The cache of a model whose layers are run one by one, after some columns of a text.

    Args:
        kinds: the attention layers.
        model_layers: all layers.
    """

    def __init__(self, text: Layerwise, kinds: list[LayerKind], model_layers: ModelLayers) -> None:
        super().__init__((), model_layers)
        self._text, self._kinds = text, kinds
        self._handed = list[Handed]()
        self._passed = PassedStates({})
        self.seek(0)

    def _states(self) -> PassedStates:
        return self._passed

    _states_to_change = _states

    def seek(self, columns: int) -> None:
        """Set the position in the text, to after `columns` columns."""
        history = self._text.history(columns)
        self.layers = [_TextLayer(self._text, history, kind) for kind in self._kinds]

    @contextmanager
    def running(self, carries: Carries, step: ChunkStep) -> Iterator[list[Handed]]:
        """A context in which `step` computes the attention of one layer and holds its states.
        Yields the list of tags issued in it."""
        layer = None if carries.slots is None else self.layers[carries.slots]
        self._handed, self._passed = [], PassedStates(step.states)
        if layer is not None:
            layer.attention = step
        if step.shared is not None and carries.reads is not None:
            self.tag(*step.shared, carries.reads)
        try:
            with self._passed.saved() if carries.stateful else nullcontext():
                yield self._handed
        finally:
            # Break a reference cycle: keys in the graph hold the layer, and the step may hold keys.
            if layer is not None:
                layer.attention = None
            self._handed, self._passed = [], PassedStates({})

    @property
    def handed(self) -> Handed:
        """The tag of the last keys given."""
        return self._handed[-1]

    def tag(self, keys: Tensor, values: Tensor, index: int) -> Handed:
        self._handed.append(super().tag(keys, values, index))
        return self._handed[-1]
