"""Attention weights of attached models, and dropout on them: steps that are written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.attention import Options, View, explicit
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config, is_routed
from kvkeep.hf.demands import require_whole
from kvkeep.hf.handover import Handed
from kvkeep.layer.layer import LayerCache

_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")

COMPILED = "{} in a compiled or graphed step, which has none; call the model uncompiled"


def ask_for_weights(decoder: PreTrainedModel, options: dict[str, Any]) -> None:
    """Tell a forward's cache whether attention weights are wanted: by an option, or by the config.

    Many models keep that from their attention modules, which other implementations need not know.

    Raises:
        UnsupportedError: they are, and some layer cannot give them. Nothing was fed.
    """
    cache, asked = options.get("past_key_values"), options.get("output_attentions")
    if not isinstance(cache, Cache):
        return
    wanted = bool(getattr(decoder.config, "output_attentions", False) if asked is None else asked)
    if not torch.compiler.is_compiling():
        cache.weights = wanted
    elif wanted:
        raise UnsupportedError(COMPILED.format("attention weights"))
    if wanted and is_routed(decoder_config(decoder.config)):
        require_whole(cache.layers)


def explicit_step(handed: Handed, dropout: float) -> Explicit | None:
    """How attention is computed where its weights are asked for, or some are to be dropped out;
    None: as always.

    Raises:
        UnsupportedError: the step belongs to a graph.
        StateError: `kvkeep.train` computes the attention.
    """
    if not (dropout or handed.weights):
        return None
    what = f"attention dropout of {dropout}" if dropout else "attention weights"
    if not isinstance(handed.layer, LayerCache):
        raise StateError(
            f"{what} where kvkeep computes attention again, with no dropout and without weights; "
            "call model.eval(), or set the dropout in the model's config to 0.0"
        )
    on_device = handed.traced is not None and handed.traced.on_device
    if torch.compiler.is_compiling() or on_device:
        raise UnsupportedError(COMPILED.format(what))
    return Explicit(handed.layer, dropout)


def drops_weights(model: PreTrainedModel) -> bool:
    """Whether a model's attention has dropout now, by the names that configs have for it."""
    config = decoder_config(model.config)
    return model.training and any(getattr(config, name, None) for name in _DROPOUT)


class Explicit:
    """One layer's attention for one step, computed with all its weights at once.

    `weights` are then (B, Hq, n, S) in the queries' dtype, over the tokens held in the order of
    their positions, the chunk's own last; what dropout left of them.
    """

    weights: Tensor | None = None

    def __init__(self, layer: LayerCache, dropout: float) -> None:
        self._layer, self._dropout = layer, dropout

    def __call__(self, q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
        """See `kvkeep.attention.Attend`."""
        moved = self._layer.moved
        out, mass, self.weights = explicit.run(q, view, options, moved=moved, dropout=self._dropout)
        return out, mass
