"""What transformers asks of a cache, under the names that it uses."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.graph.custom_ops import Traced
from kvkeep.hf.config import is_routed
from kvkeep.hf.drafts import RecordsDrafts
from kvkeep.hf.handover import MaskLength
from kvkeep.hf.model_layers import TellsLayers


class TransformersNames(TellsLayers, RecordsDrafts):
    """The members of `Cache` that only transformers' own code reads."""

    config: PreTrainedConfig
    written_out = False  # whether a `generate()` needs what no graph computes, such as dropout
    _fixed: bool
    _traced: list[Traced]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed to the model, including padding and evicted tokens; a tensor in a compiled
        graph."""
        if torch.compiler.is_compiling():
            return self._traced[self.model_layers.indices[layer_idx]].fed()  # type: ignore[return-value]
        if self.lent is not None:
            return self.fed
        # A forward feeds one layer after another.
        return self._layers[self.model_layers.indices.get(layer_idx, 0)].cursor.history.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first column of the keys that `update` will return for this layer."""
        # It is asked of layer 0 also if that does not attend.
        index = self.model_layers.indices.get(layer_idx, 0)
        layer = self._layers[index] if not self.lent else self.layers[index]
        if torch.compiler.is_compiling():
            kept, fed, length = 0, 0, MaskLength(1)  # a traced symbol cannot be of this subclass
        else:
            self._end_recording()
            kept, fed = layer.sight.reachable(layer.cursor), layer.cursor.history.columns
            length = MaskLength(kept + query_length)
        length.layer, length.routed = layer, is_routed(self.config)
        length.traced, length.compileable = self._traced[index], self._may_compile(length.routed)
        length.hide = self.hide
        return length, fed - kept

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens that fit, -1 when there is no limit."""
        limit = self.token_limit(layer_idx)
        return -1 if limit is None else limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`reorder`, under the name that beam search uses."""
        self.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """`repeat`, under transformers' name."""
        self.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """`select`, under transformers' name."""
        self.select(indices)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model with this cache: slots are allocated once, and
        the model is attached. A compiled graph serves all caches, so while tracing the answer
        depends on the model only."""
        return self._may_compile(is_routed(self.config))

    def _may_compile(self, routed: bool) -> bool:
        if torch.compiler.is_compiling():
            return routed
        return routed and self._fixed and not (self.written_out or self.lent)

    @property
    def is_initialized(self) -> bool:
        return self.fed > 0

    @property
    def is_croppable(self) -> bool:
        decided = is_routed(self.config) or not any(layer.by_token for layer in self.layers)
        # States return to marks, which are made while drafts are recorded.
        return decided and (not self.carried or self.layers[0].record_past)

    @property
    def batch_size(self) -> int:
        return self.rows or -1
