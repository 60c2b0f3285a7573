"""Models that run some layers several times, with own keys and values each time: Dory."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from kvkeep.hf.config import refused
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind


class Looped(Kind):
    """The model counts each further run of a layer as a layer behind all others."""

    def has(self, text: PreTrainedConfig) -> bool:
        return getattr(text, "recurrent_kv_cache_mode", None) is not None

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Raise UnsupportedError if earlier runs read the keys of the last one."""
        if text.recurrent_kv_cache_mode != "per_loop":
            raise refused(
                text,
                "several runs of a layer read the same keys, unless it is loaded with "
                "recurrent_kv_cache_mode='per_loop'",
            )
        first = text.n_input_layers
        again = layers[first : first + text.n_recurrent_layers]
        return [*layers, *[*again] * (text.n_recurrent_loops - 1)]
