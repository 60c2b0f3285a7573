"""Models that run some layers several times, with own keys and values each time: Dory, and
Inkling 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from transformers import PreTrainedConfig

from kvkeep.hf.config import refused
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind

T = TypeVar("T")


class Looped(Kind):
    """The model counts each further run of a layer as a layer behind all others."""

    def has(self, text: PreTrainedConfig) -> bool:
        return _loop(text) is not None

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Raise UnsupportedError if earlier runs read the keys of the last one."""
        if getattr(text, "recurrent_kv_cache_mode", "per_loop") != "per_loop":
            raise refused(
                text,
                "several runs of a layer read the same keys, unless it is loaded with "
                "recurrent_kv_cache_mode='per_loop'",
            )
        return with_further_runs(text, layers)


def with_further_runs(text: PreTrainedConfig, layers: Sequence[T]) -> list[T]:
    """The elements of `layers`, one for each layer of a model, and behind them again those of
    layers that run several times, for each further run."""
    first, end, runs = _loop(text) or (0, 0, 1)
    return [*layers, *[*layers[first:end]] * (runs - 1)]


def _loop(text: PreTrainedConfig) -> tuple[int, int, int] | None:
    """The first layer that runs several times, the layer after the last one, and the number of
    runs; None: every layer runs once."""
    if getattr(text, "recurrent_kv_cache_mode", None) is not None:
        first = text.n_input_layers
        return first, first + text.n_recurrent_layers, text.n_recurrent_loops
    if getattr(text, "loop_num_passes", None) is not None:
        return text.loop_layer_index_start, text.loop_layer_index_end, text.loop_num_passes
    return None
