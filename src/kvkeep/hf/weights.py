"""Attention weights of attached models, and dropout on them: steps that are written out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.attention import Options, View, each_head, explicit
from kvkeep.errors import UnsupportedError
from kvkeep.layer import LayerCache
from kvkeep.planes import Reach


def wanted(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a model asks an attention module for its weights: by an option of the forward, or by
    its config."""
    asked = options.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(asked)


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
        if not view.by_head:
            out, mass, self.weights = explicit.run(
                q, view, options, moved=self._layer.moved, dropout=self._dropout
            )
            return out, mass
        heads: list[Tensor] = []

        def one(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
            out, mass = self(q, view, options)
            heads.extend([] if self.weights is None else [self.weights])
            return out, mass

        found = each_head(q, view, options, one)
        alike = len({weights.shape[3] for weights in heads}) == 1
        self.weights = torch.cat(heads, dim=1) if alike else None
        return found


def require_whole(layers: Iterable[LayerCache], tokens: int = 1) -> None:
    """Raise UnsupportedError where layers cannot give the attention weights of every token, as long
    as `tokens` more are fed one by one: where they dropped some already, or will before the last.

    A layer with a sliding window of its own holds all that its queries may see, as it does in
    transformers' own cache.
    """
    for index, layer in enumerate(layers):
        policy, held, fed = layer.policy, layer.length, layer.fed
        if layer.window is not None and policy.reach == Reach(layer.window):
            continue
        before, budget = fed + tokens - 1, policy.budget
        if held != fed or (policy.ragged and layer.moved):
            why = f"layer {index} holds {held} slots for the {fed} tokens that were fed"
        elif budget is not None and before > budget:
            why = f"layer {index} will have dropped some of {before} tokens: it keeps {budget}"
        else:
            continue
        raise UnsupportedError(
            f"output_attentions asks for the weights of all tokens, but {why} (policy "
            f"{policy.name}); use a keep_all cache for them, or leave output_attentions out"
        )
