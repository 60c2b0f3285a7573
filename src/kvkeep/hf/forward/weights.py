"""Attention weights of attached models, and dropout on them, computed without fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvkeep.attention import Options, View, explicit
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config, is_routed
from kvkeep.hf.demands import require_whole
from kvkeep.hf.handover import Handed
from kvkeep.layer.layer import LayerCache

_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")

COMPILED = "{} in a compiled or graphed step, which does not support it; call the model uncompiled"


def ask_for_weights(decoder: PreTrainedModel, cache: Cache, options: dict[str, Any]) -> None:
    """Record in a forward's cache whether attention weights are requested, by an option or by the
    config, because many models do not pass the option on to their attention modules.

    Raises:
        UnsupportedError: weights are requested, but a layer cannot return them. No token was fed.
    """
    asked = options.get("output_attentions")
    wanted = bool(getattr(decoder.config, "output_attentions", False) if asked is None else asked)
    if not torch.compiler.is_compiling():
        cache.weights = wanted
    elif wanted:
        raise UnsupportedError(COMPILED.format("attention weights"))
    if wanted and is_routed(decoder_config(decoder.config)):
        require_whole(cache.layers)


def explicit_step(handed: Handed, dropout: float) -> Explicit | None:
    """The attention for a step that returns weights or applies dropout; None for any other step.

    Raises:
        UnsupportedError: the step is part of a compiled or CUDA graph.
        StateError: the step is a recomputation by `kvkeep.train`.
    """
    if not (dropout or handed.weights):
        return None
    what = f"attention dropout of {dropout}" if dropout else "attention weights"
    if not isinstance(handed.layer, LayerCache):
        raise StateError(
            f"{what} in kvkeep's recomputation of attention, which supports neither dropout nor "
            "weights; call model.eval(), or set the dropout in the model's config to 0.0"
        )
    on_device = handed.traced is not None and handed.traced.on_device
    if torch.compiler.is_compiling() or on_device:
        raise UnsupportedError(COMPILED.format(what))
    return Explicit(handed.layer, dropout)


def drops_weights(model: PreTrainedModel) -> bool:
    """Whether a model's attention currently applies dropout, according to its config."""
    config = decoder_config(model.config)
    return model.training and any(getattr(config, name, None) for name in _DROPOUT)


class Explicit:
    """One layer's attention for one step, which computes all attention weights at once.

    Afterwards `weights` are (B, Hq, n, S) in the queries' dtype, after dropout, over the slots in
    the order of positions, the chunk's tokens last.
    """

    weights: Tensor | None = None

    def __init__(self, layer: LayerCache, dropout: float) -> None:
        self._layer, self._dropout = layer, dropout

    def __call__(self, q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
        """See `kvkeep.attention.Attend`."""
        moved = self._layer.contents.moved
        out, mass, weights = explicit.run(q, view, options, moved=moved, dropout=self._dropout)
        if self.weights is not None:  # weights of earlier pieces (drafts), over fewer slots
            before = pad(self.weights, (0, weights.shape[3] - self.weights.shape[3]))
            weights = torch.cat([before, weights], dim=2)
        self.weights = weights
        return out, mass
