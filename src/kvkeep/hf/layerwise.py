"""A decoder taken apart: what stands before its layers, each layer by itself, what comes after."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.hf.attach import attach, decoder_of, unwrapped
from kvkeep.hf.config import decoder_config, is_latent, is_routed, layer_kinds
from kvkeep.hf.handover import Handed, MaskLength, hand_over
from kvkeep.hf.inputs import check_tokens
from kvkeep.layer.history import Ledger
from kvkeep.layer.step import StepInputs


class Step(Protocol):
    """What a layer's attention does with its chunk, such as a `LayerCache`."""

    @property
    def window(self) -> int | None:
        """The layer's own sliding window."""

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""


class Call(NamedTuple):
    """What a model calls a layer with, beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Apart:
    """The parts of a model, for one batch of texts whose columns are fed a chunk at a time.

    While it is entered, the model is attached, if it was not.

    Args:
        model: a decoder-only transformers model, or a PEFT model around one.
        input_ids: (B, T).
        attention_mask: (B, T), 0 for padding; None: there is none.

    Raises:
        UnsupportedError: a model that cannot be taken apart.
        StateError: gradient checkpointing is on.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        adapters = getattr(model, "peft_config", {}).values()
        if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
            raise UnsupportedError(
                "an activated LoRA is switched on in the midst of a text by PEFT's own forward, "
                "which this does not run; train it as PEFT does"
            )
        prompts = [adapter for adapter in adapters if adapter.is_prompt_learning]
        if prompts:
            raise UnsupportedError(
                f"{prompts[0].peft_type} puts learned tokens before a text, outside of the model; "
                "train LoRA or the model's own weights"
            )
        self.model = unwrapped(model)
        if is_latent(self.model.config):
            raise UnsupportedError(
                f"{type(self.model).__name__} caches a latent, which its own attention expands; "
                "there are no gradients through a kvkeep cache for it"
            )
        if getattr(decoder_config(self.model.config), "output_router_logits", False):
            raise UnsupportedError(
                "the model's config asks for router logits, for an auxiliary loss which is not "
                "computed here; set output_router_logits=False (TRL: router_aux_loss_coef=0.0)"
            )
        if any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            raise StateError(
                "the model is in gradient checkpointing, which this replaces; call "
                "model.gradient_checkpointing_disable(), or give a trainer's arguments "
                "gradient_checkpointing=False"
            )
        self.decoder = decoder_of(self.model)
        self.kinds = layer_kinds(self.model.config)
        self.layers = _layers_of(self.decoder, len(self.kinds))
        check_tokens(self.model, input_ids)
        self.input_ids = input_ids
        padded = attention_mask is not None and not bool(attention_mask.bool().all())
        self.attention_mask = attention_mask if padded else None
        self._feed = _Feed(self.attention_mask, len(input_ids), [k.window for k in self.kinds])
        self._attachment: Any = None
        self._output: Any = None

    def __enter__(self) -> Apart:
        self._share_out()
        if not is_routed(decoder_config(self.model.config)):
            self._attachment = attach(self.model)
        return self

    def __exit__(self, *error: object) -> None:
        if self._attachment is not None:
            self._attachment.__exit__(*error)
        self._share_out()

    @property
    def beside(self) -> list[nn.Parameter]:
        """Weights outside of the layers."""
        of_layers = {id(p) for p in self.layers.parameters()}
        return [p for p in self.model.parameters() if id(p) not in of_layers]

    def _share_out(self) -> None:
        """Weights lie where FSDP2 keeps them, so that gradients are found beside those."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def ledger(self, columns: int) -> Ledger:
        """What has passed through every layer once so many columns have."""
        self._feed.seek(columns)
        return self._feed.ledger

    def before(self, columns: slice) -> tuple[Tensor, list[Call]]:
        """What the first layer gets for some columns, (B, n, width), and what each layer is called
        with beside."""
        first: list[Tensor] = []
        calls: list[Call] = []

        def layer(index: int, hidden: Tensor, call: Call) -> Tensor:
            if first and hidden is not first[0]:
                raise UnsupportedError(
                    f"{type(self.model).__name__} does something between its layers; gradients "
                    "through a cache need layers that follow each other"
                )
            first.append(hidden)
            calls.append(call)
            return hidden

        output = self._forward(columns, layer, last=True)
        self._output = output[0] if isinstance(self.model, FSDPModule) else None
        if len(calls) != len(self.layers):
            raise UnsupportedError(
                f"{type(self.model).__name__} ran {len(calls)} of its {len(self.layers)} layers"
            )
        return first[0], calls

    def before_backward(self, hidden: Tensor, gradient: Tensor, *, last: bool) -> None:
        """From the gradient of what `before` just computed to those of weights; `last`: the last
        that they get."""
        ends, gradients = [hidden], [gradient]
        if isinstance(self.model, FSDPModule):  # it waits for a gradient of its own output
            ends.append(self._output)
            gradients.append(torch.zeros_like(self._output))
        reduces(self.model, last, recurse=False)
        accumulate(ends, gradients)

    def layer(self, index: int, hidden: Tensor, call: Call, step: Step) -> Tensor:
        """One layer on a chunk (B, n, width), with attention by `step`."""
        self._feed.step = step
        try:
            out = self.layers[index](hidden, *call.args, **call.kwargs)
            if not self._feed.attended:
                raise UnsupportedError(
                    f"{type(self.layers[index]).__name__} does not attend once to the keys that "
                    "it gives to its cache"
                )
        finally:
            self._feed.forget()
        if not isinstance(out, Tensor):
            raise UnsupportedError(
                f"{type(self.layers[index]).__name__} returns more than hidden states"
            )
        return out

    def hidden(self, columns: slice, hidden: Tensor) -> Tensor:
        """What the model makes of the last layer's output: last_hidden_state, (B, n, width)."""
        found: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output[0])

        hook = self.decoder.register_forward_hook(keep)
        try:
            self._forward(columns, self._replaced(hidden), last=True)
        finally:
            hook.remove()
        return found[-1]

    def logits(self, columns: slice, hidden: Tensor) -> Tensor:
        """What the model makes of the last layer's output: logits (B, n, V).

        Raises:
            UnsupportedError: the model has no language model head.
        """
        logits = getattr(self._forward(columns, self._replaced(hidden)), "logits", None)
        if logits is None or logits.shape[:2] != hidden.shape[:2]:
            raise UnsupportedError(
                f"{type(self.model).__name__} has no logits for each token; give a head, a "
                "function of hidden states"
            )
        return cast(Tensor, logits)

    def _replaced(self, hidden: Tensor) -> Callable[[int, Tensor, Call], Tensor]:
        last = len(self.layers) - 1
        return lambda index, given, call: hidden if index == last else given

    def _forward(
        self, columns: slice, layer: Callable[[int, Tensor, Call], Tensor], last: bool = False
    ) -> Any:
        """The whole model, with `layer` in place of each layer; `last`: logits of one token do."""
        options: dict[str, Any] = {}
        if last and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = 1
        mask = self.attention_mask
        self._feed.seek(columns.start)
        with _stubs(self.layers, layer):
            return self.model(
                input_ids=self.input_ids[:, columns],
                attention_mask=None if mask is None else mask[:, : columns.stop],
                past_key_values=self._feed,
                use_cache=True,
                **options,
            )


def accumulate(ends: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """`torch.autograd.backward`, in the dtypes of the forward."""
    with torch.autocast(ends[0].device.type, enabled=False):
        torch.autograd.backward(ends, gradients)


def average(model: nn.Module) -> None:
    """Average gradients over processes, as the backward of a DistributedDataParallel does; others
    are left alone."""
    if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
        return
    for p in model.parameters():
        if p.requires_grad:  # on every process alike, or they would wait for each other
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(p.grad, group=model.process_group)
            p.grad /= torch.distributed.get_world_size(model.process_group)


def reduces(module: nn.Module, on: bool, *, recurse: bool = True) -> None:
    """Whether a backward through a module reduces its gradients over the processes that share it,
    or leaves them to a later one; for FSDP2."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on, recurse=recurse)


def _layers_of(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedError(f"{type(decoder).__name__} holds no list of its {count} layers")


class _Stub(nn.Module):
    """Stands where a layer does; models read other attributes of their layers too."""

    def __init__(self, layer: nn.Module, run: Callable[[Tensor, Call], Tensor]) -> None:
        super().__init__()
        self.__dict__["_stands_for"], self.__dict__["_run"] = layer, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stands_for"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.__dict__["_run"](hidden_states, Call(args, kwargs))
        return result


@contextmanager
def _stubs(layers: nn.ModuleList, run: Callable[[int, Tensor, Call], Tensor]) -> Iterator[None]:
    modules, before = layers._modules, dict(layers._modules)
    if any(isinstance(layer, _Stub) for layer in before.values()):
        raise StateError(
            "this model is being taken apart by another thread; give each thread a model of its own"
        )
    try:
        for index, (name, layer) in enumerate(before.items()):
            assert layer is not None

            def one(hidden: Tensor, call: Call, index: int = index) -> Tensor:
                return run(index, hidden, call)

            modules[name] = _Stub(layer, one)
        yield
    finally:
        modules.update(before)


class _Feed(transformers.Cache):
    """What a model asks of its cache while no layer runs; new keys go to the step that is handed.

    Its `ledger` is that of every layer once `columns` columns have passed.
    """

    is_compileable = False

    def __init__(self, mask: Tensor | None, rows: int, windows: list[int | None]) -> None:
        self.step: Step | None = None
        self._handed: list[Handed] = []
        self._mask, self._rows, self._windows = mask, rows, windows
        self.seek(0)

    def seek(self, columns: int) -> None:
        """Be as after so many columns."""
        self.ledger = Ledger()
        self.ledger.columns = self.ledger.floor = columns
        self.ledger.geometry = Geometry(self._rows, 1, 1, 1, torch.float32)
        if self._mask is not None:
            self.ledger.pads = (self._mask[:, :columns] == 0).sum(dim=1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, untraced = cast(Any, self.step), cast(Any, None)
        self._handed.append(hand_over(key_states, value_states, layer, untraced))
        return key_states, value_states

    @property
    def attended(self) -> bool:
        """Whether keys were given, and taken, once."""
        return [handed.taken for handed in self._handed] == [True]

    def forget(self) -> None:
        """Free the step, which keys would hold as long as it holds them."""
        for handed in self._handed:
            handed.layer = cast(Any, None)
        self._handed.clear()
        self.step = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ledger.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        ledger, length = self.ledger, MaskLength(self.ledger.columns + query_length)
        seen = SimpleNamespace(
            next_positions=ledger.next_positions,
            window=self._windows[layer_idx],
            fed=ledger.columns,
            seen=ledger.seen,
            padded=ledger.pads is not None,
            ledger=ledger,
        )
        length.layer, length.routed, length.compileable = cast(Any, seen), True, False
        return length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [window is not None for window in self._windows]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self._windows)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self._windows)
