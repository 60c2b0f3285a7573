"""Run a LitGPT model with attention by the layers of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from litgpt.lora import CausalSelfAttention as LoRAAttention
from litgpt.model import (
    GPT,
    CausalSelfAttention,
    KVCache,
    MultiheadLatentAttention,
    batched_index_select,
    do_softcapping,
)
from torch import Tensor, nn

from kvkeep.context import within
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.host import LayerStep, Narrowed
from kvkeep.layer.step import StepInputs

_ATTENTION = (CausalSelfAttention, LoRAAttention, MultiheadLatentAttention)
_INSTEAD = "scaled_dot_product_attention"  # the attention's method that kvkeep replaces


@dataclass
class Forward:
    """One forward: the step of each layer, and the positions, int32 (n,), or (B, n) with -1 for
    padding. `handed` passes keys and values from a layer's cache to its attention."""

    steps: Sequence[LayerStep]
    position: Tensor
    handed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Traced:
    """The forward that torch.compile is tracing, because context variables cannot be traced."""

    forward: Forward | None = None

    def current(self) -> Forward | None:
        """This thread's current forward; None outside a kvkeep forward."""
        return self.forward if torch.compiler.is_compiling() else FORWARD.get()


FORWARD: ContextVar[Forward | None] = ContextVar("kvkeep_litgpt_forward", default=None)
"""This thread's current forward; None outside a kvkeep forward."""


class Handover(KVCache):  # type: ignore[misc]  # LitGPT has no types
    """Replaces an attention's cache, and passes the received keys and values to the attention."""

    def __init__(self, index: int, before: KVCache | None, traced: Traced) -> None:
        nn.Module.__init__(self)  # without a KVCache's buffers
        self.index, self.traced = index, traced
        self.before = (before,)  # in a tuple, so that it does not become a submodule

    def forward(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, H, n, D), unchanged."""
        forward = self.traced.current()
        if forward is None:
            raise StateError(
                "a block of an attached LitGPT model was called by itself with input_pos; call the "
                "model"
            )
        forward.handed[self.index] = k, v
        return k, v

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""


class Attention:
    """Replaces `scaled_dot_product_attention` of an attached layer."""

    def __init__(self, module: Any, index: int, traced: Traced) -> None:
        self.module, self.index, self.traced = module, index, traced
        config = module.config
        latent = isinstance(module, MultiheadLatentAttention)
        width = config.qk_head_dim if latent else config.head_size
        self.scale = (config.attention_scores_scalar or width) ** -0.5 * module.mscale**2
        self.softcap = config.attention_logit_softcapping

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q (B, Hq, n, D) -> (B, n, Hq, D). In a kvkeep forward, keys and values are those of the
        layer's `Handover`, taken before their heads were repeated."""
        forward = self.traced.current()
        handed = None if forward is None else forward.handed.pop(self.index, None)
        if forward is None or handed is None:
            out: Tensor = getattr(type(self.module), _INSTEAD)(self.module, q, k, v, mask)
            return out
        position = forward.position.to(q.device)
        inputs = StepInputs(q, *handed, position, self.scale, self.softcap)
        return forward.steps[self.index].run(inputs).transpose(1, 2)


def attentions(gpt: GPT) -> list[Any]:
    """The attention of each layer.

    Raises:
        UnsupportedError: an attention is not LitGPT's own, such as an adapter's.
    """
    modules = [block.attn for block in gpt.transformer.h]
    for index, module in enumerate(modules):
        if type(module) not in _ATTENTION:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UnsupportedError(
                f"kvkeep cannot attach this GPT: the attention of layer {index} is a {kind}; use "
                "the models of litgpt.model or litgpt.lora"
            )
    return modules


def route(gpt: GPT, traced: Traced | None = None) -> None:
    """Make every layer's attention run the step of the current forward, if there is one."""
    traced = Traced() if traced is None else traced
    for index, module in enumerate(attentions(gpt)):
        before = module.kv_cache
        del module.kv_cache
        module.kv_cache = Handover(index, before, traced)
        module.__dict__[_INSTEAD] = Attention(module, index, traced)


def unroute(gpt: GPT) -> None:
    """Undo `route`."""
    for module in attentions(gpt):
        (before,) = module.kv_cache.before
        del module.kv_cache  # unregisters the `Handover` as a submodule
        module.kv_cache = before
        module.__dict__.pop(_INSTEAD, None)


def is_routed(gpt: GPT) -> bool:
    """Whether `route` was called."""
    return _INSTEAD in gpt.transformer.h[0].attn.__dict__


NARROWED: ContextVar[tuple[int, Callable[[], Narrowed]] | None] = ContextVar(
    "kvkeep_litgpt_narrowed", default=None
)
"""(layer, function): from that layer on, this thread's forwards compute only the tokens that the
function returns."""


def run(gpt: GPT, ids: Tensor, forward: Forward) -> Tensor:
    """Feed ids (B, n); return the output of `ln_f`, (B, n, width)."""
    narrowed = NARROWED.get()
    with running(gpt, forward):
        x = embedded(gpt, ids)
        for index in range(len(forward.steps)):
            if narrowed is not None and index == narrowed[0]:
                chosen = narrowed[1]()
                x = x[:, chosen.indices.to(x.device)]
                forward.position = chosen.positions.to(torch.int32)
            x = block(gpt, index, x, forward.position)
        normed: Tensor = gpt.transformer.ln_f(x)
        return normed


def running(gpt: GPT, forward: Forward) -> AbstractContextManager[None]:
    """A context for a forward of this thread."""
    if not is_routed(gpt):
        raise StateError("this GPT is not attached; call kvkeep.attach(gpt)")
    return within(FORWARD, forward)


def require_positions(gpt: GPT, count: int) -> None:
    """Raise ShapeError if the model has fewer than `count` positions."""
    most = len(gpt.cos)
    if count > most:
        raise ShapeError(
            f"{count} positions, but the model has {most}; feed fewer tokens, or set "
            f"gpt.max_seq_length to at most {gpt.config.block_size}"
        )


def embedded(gpt: GPT, ids: Tensor) -> Tensor:
    """The first layer's input, (B, n, width), for ids (B, n)."""
    x: Tensor = gpt.transformer.wte(ids)
    if gpt.config.scale_embeddings:
        x = x * torch.tensor(gpt.config.n_embd**0.5, dtype=x.dtype)
    return x


def block(gpt: GPT, index: int, x: Tensor, position: Tensor) -> Tensor:
    """Run one layer on x (B, n, width) at positions (n,) or (B, n), within a `running` forward."""
    place = position.to(gpt.cos.device).long().clamp(min=0)
    cos, sin = (batched_index_select(table, 0, place) for table in (gpt.cos, gpt.sin))
    if position.dim() == 1:
        cos, sin = cos[None], sin[None]
    which = gpt.config.rope_indices
    if which is not None:
        cos, sin = cos[..., which[index]], sin[..., which[index]]
    out: Tensor = gpt.transformer.h[index](x, cos, sin, None, place)
    return out


def logits(gpt: GPT, x: Tensor) -> Tensor:
    """The logits (..., V) for outputs of `ln_f`, (..., width)."""
    unbounded: Tensor = gpt.lm_head(x)
    most = gpt.config.final_logit_softcapping
    return unbounded if most is None else do_softcapping(unbounded, most)
