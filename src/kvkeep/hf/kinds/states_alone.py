"""Models without attention layers, such as Mamba: a cache of states only.

A cache counts tokens by its layers. For these models it has one layer, in place of the first
recurrent layer, whose slots hold a number for each token. So counting, files, forks and stores work
as for any other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.hf.inputs import fed_by
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind

_RECURRENT = "linear_attention"


class StatesAlone(Kind):
    """Models whose layers are all recurrent."""

    own: ClassVar[str] = "none of its layers attends"
    attends: ClassVar[bool] = False

    def has(self, text: PreTrainedConfig) -> bool:
        return set(getattr(text, "layer_types", None) or ()) == {_RECURRENT}

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """The first layer counts tokens."""
        return [LayerKind(_RECURRENT, None, counts=True), *layers[1:]]

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Count the tokens."""
        tokens = fed_by(given)
        if tokens is not None:
            number = torch.zeros(len(tokens), 1, tokens.shape[1], 1, device=tokens.device)
            cache.update(number, number, 0)
