"""Export a model's step together with its cache, as a program that does not need transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from kvkeep.errors import KVKeepError, SpecError, UnsupportedError, reason_of
from kvkeep.features import Feature
from kvkeep.graph.export_op import Description, LayerTensors
from kvkeep.graph.program import FORMAT, Header, Program
from kvkeep.hf.attach import attach_routed, detach, unwrapped
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache, cache_name
from kvkeep.hf.config import base_config, decoder_config, is_routed
from kvkeep.hf.forward.placing import first_position
from kvkeep.hf.kinds import layer_kinds, require
from kvkeep.hf.kinds.multimodal import require_counted
from kvkeep.hf.loading.fingerprint import fingerprint
from kvkeep.hf.parallel import is_parallel
from kvkeep.hf.weight_parts import is_joined
from kvkeep.host import Specs
from kvkeep.planes import Chunks
from kvkeep.version import __version__

_NEAR = 1e-4
_SEVERAL = 4
"""Number of tokens with which a step for any number is traced; 1 would become a constant."""

DEFAULT_SPEC = "keep_all@fixed:2048"


def export(
    model: PreTrainedModel, spec: Specs = DEFAULT_SPEC, *, rows: int = 1, tokenizer: Any = None
) -> Program:
    """Trace a model's step, including its cache, as a program that can be saved and run in another
    process.

    Args:
        model: a decoder that can be attached; its weights are shared, not copied.
        spec: the cache's spec, with fixed storage, whose slots are part of the program.
        rows: batch size.
        tokenizer: the tokenizer; its hashes are stored in the header.

    Raises:
        UnsupportedError: the model cannot be attached, the cache's state can grow, or torch cannot
            trace the model's step.
        SpecError: the spec does not exist or does not fit the model, or `rows` is below 1.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise SpecError(f"a program of {rows} rows; give a whole number of at least 1")
    model = unwrapped(model)
    if is_parallel(model):
        raise UnsupportedError(
            f"each process has a part of this {type(model).__name__}, but a program runs in one "
            "process; export a model that was loaded whole"
        )
    require(model, Feature.EXPORTED, "run the model itself")
    require_counted(model, None, "exported programs")
    joined = next((x for x in model.parameters() if is_joined(x)), None)
    if joined is not None:
        raise UnsupportedError(
            f"torch saves weights of class {type(joined).__name__} as pickles, which programs must "
            "not contain; export the model with plain weights"
        )
    attached = is_routed(decoder_config(model.config))
    training = [part for part in model.modules() if part.training]
    if not attached:
        attach_routed(model, "an exported program")
    try:
        traced, header = _exported(model.eval(), spec, rows, tokenizer)
    finally:
        for part in training:
            part.training = True
        if not attached:
            detach(model)
    return Program(traced, header)


def _exported(
    model: PreTrainedModel, spec: Specs, rows: int, tokenizer: Any
) -> tuple[ExportedProgram, Header]:
    step = _Step(model, spec, rows)
    fault: Exception | None = None
    try:
        traced = None if step.state_names else _traced(step, rows, _SEVERAL)
    except _TraceError as error:
        traced, fault = None, error
    try:
        traced = traced or _traced(step, rows, 1)  # the program then feeds tokens one by one
    except _TraceError as error:
        raise UnsupportedError(
            f"torch cannot export a step of {type(model).__name__}: {fault or error}; run the "
            "model itself"
        ) from error
    assert traced is not None  # a step of one token is returned also with complex numbers
    traced._example_inputs = None  # torch would save them as pickles
    specs = [description.spec for description in step.descriptions]
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    known = fingerprint(model, tokenizer)
    return traced, Header(FORMAT, __version__, specs, rows, step.room, vocabulary, known)


class _TraceError(Exception):
    """An error of torch's tracer, which raises errors of many types."""


def _traced(step: _Step, rows: int, some: int) -> ExportedProgram | None:
    """Trace a step with `some` tokens: for any number of tokens, or for one token if `some` is 1.
    None: the step uses complex numbers, which torch would fix to this number of tokens.

    Raises:
        _TraceError: torch cannot trace the step.
    """
    example = torch.zeros(rows, some, dtype=torch.int64, device=step.model.device)
    most = max(some, min(step.room, 2**20))  # the program checks its room itself
    tokens = {1: Dim("tokens", min=1, max=most)} if some > 1 else {}
    try:
        with torch.no_grad():
            traced = torch.export.export(
                step,
                (example, torch.ones_like(example, dtype=torch.bool)),
                dynamic_shapes=(tokens, tokens),
                strict=False,
            )
    except (KVKeepError, MemoryError):
        raise
    except Exception as error:
        raise _TraceError(reason_of(error)) from error
    values = (node.meta.get("val") for node in traced.graph.nodes)
    complexes = any(isinstance(x, Tensor) and x.is_complex() for x in values)
    return None if complexes and some > 1 else traced


class _Step(nn.Module):
    """Maps new tokens (B, n) and a mask, True for tokens that are not padding, to the logits (B, V)
    of the next token."""

    def __init__(self, model: PreTrainedModel, spec: Specs, rows: int) -> None:
        super().__init__()
        self.model = model
        self.cache = Cache(model, spec)
        kinds = layer_kinds(base_config(model))
        self.descriptions = [
            Description(
                *(str(s), layer.slots.limit or 0, index, len(kinds)),
                *(kind.window, isinstance(kind.window, Chunks)),
                *([*(kind.slopes or ())], kind.latent or 0),
                readers=kind.readers,
            )
            for index, (s, layer, kind) in enumerate(
                zip(self.cache.specs, self.cache.layers, kinds, strict=True)
            )
        ]
        with torch.inference_mode():
            first = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
            logits = model(first, **as_cache(model, self.cache)).logits
        pairs = zip(self.descriptions, self.cache.layers, strict=True)
        self.layers = nn.ModuleList(LayerTensors(text, layer) for text, layer in pairs)
        self.states, self.state_names = nn.Module(), [*self.cache.carried.tensors()]
        for name, x in self._empty_states(first, logits).items():
            self.states.register_buffer(name.replace(".", "_"), x)
        self.cache.reset()
        self.cache.carried.running = True
        self.cache._traced = [x for x in self.layers if isinstance(x, LayerTensors)]
        self.cache_name, self.first = cache_name(model), first_position(model)
        self.shortened = "logits_to_keep" in inspect.signature(model.forward).parameters

    def _empty_states(self, first: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """The states of recurrent layers before the first token: zeros.

        Args:
            first: a token of each row, (B, 1), which was fed to the cache.
            logits: the model's logits for it.

        Raises:
            UnsupportedError: the model returns other logits if its states begin with zeros.
        """
        cache = self.cache
        empty = {
            name: torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            for name, x in cache.carried.tensors().items()
        }
        if not empty:
            return empty
        cache.reset()
        cache.carried.load({name: x.clone() for name, x in empty.items()})
        with torch.inference_mode():
            found = self.model(first, **as_cache(self.model, cache)).logits
        if not torch.allclose(found, logits, rtol=_NEAR, atol=_NEAR * float(logits.abs().max())):
            raise UnsupportedError(
                f"the recurrent layers of {type(self.model).__name__} begin with states other than "
                "zeros, which programs do not support; run the model itself"
            )
        return empty

    @property
    def room(self) -> int:
        """The most columns that can be fed in total, and so in one call."""
        limits = [
            x.slots.limit for x in self.cache.layers if x.slots.limit and x.policy.budget is None
        ]
        config = decoder_config(base_config(self.model))
        if getattr(config, "rope_parameters", None) is None:  # learned positions are limited
            limits.append(getattr(config, "max_position_embeddings", None) or 2**31 - 1)
        return min(limits, default=2**31 - 1)

    def forward(self, input_ids: Tensor, real: Tensor) -> Tensor:
        first = self.layers[0]
        assert isinstance(first, LayerTensors)
        position = first.next_positions(input_ids.shape[1], input_ids.device, real)
        asked: dict[str, Any] = {"logits_to_keep": 1} if self.shortened else {}
        states = dict(zip(self.state_names, self.states.buffers(), strict=True))
        before = [x.clone() for x in states.values()]
        self.cache.carried.hold(states)
        logits: Tensor = self.model(
            input_ids,
            attention_mask=position[:, None, None],
            position_ids=position.clamp(min=0).to(torch.int64) + self.first,
            use_cache=True,
            **{self.cache_name: self.cache},
            **asked,
        ).logits
        for x, old in zip(states.values(), before, strict=True):
            own = real.view(-1, *[1] * (x.dim() - 1))  # a row of padding (n is 1) changes no state
            x.copy_(torch.where(own, x, old))
        return logits[:, -1]
