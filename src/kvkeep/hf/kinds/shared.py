"""Models with layers that attend to an earlier layer's keys and values (Gemma 3n and 4)."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature, Lacks, unsupported
from kvkeep.hf.config import refused
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind

_SHARED = "shared_kv_states"
"""The argument by which a layer passes its keys and values to later layers of its type."""


class _Pair(UserDict[str, Any]):
    """The keys and values that one layer reads, whatever its type."""

    def __init__(self, pair: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self._pair = pair

    def __missing__(self, name: str) -> Any:
        return self._pair


class Shared(Kind):
    """After the step of a layer with slots, later layers read its slots; see `Writer.read`."""

    lacks: ClassVar[Lacks] = unsupported(
        "has layers that reuse the keys and values of other layers",
        Feature.REREAD,
        Feature.GRAPHED,
        Feature.NARROWED,
    )

    narrows: ClassVar[bool] = True

    def has(self, text: PreTrainedConfig) -> bool:
        return not {None, "store"}.issuperset(getattr(text, "kv_sharing_modes", None) or ())

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Layers that reuse keys and values have no `LayerKind`; the layer that they read counts
        its readers.

        Raises:
            UnsupportedError: a layer reuses keys and values of a later layer, or in an unknown way.
        """
        modes = text.kv_sharing_modes
        found, read = list(layers), self._read(modes, names)
        for place, mode in enumerate(modes):
            if place in read:
                own = found[read[place]]
                if own is not None:
                    found[read[place]] = replace(own, readers=own.readers + 1)
                found[place] = None
            elif mode not in (None, "store"):
                raise refused(
                    text, f"layer {place} shares keys and values in an unknown way, {mode}"
                )
        return found

    def reads(self, text: PreTrainedConfig) -> Mapping[int, int]:
        modes = getattr(text, "kv_sharing_modes", None) or ()
        return self._read(modes, getattr(text, "layer_types", None) or [""] * len(modes))

    def _read(self, modes: Sequence[str | None], names: Sequence[str]) -> dict[int, int]:
        """The result of `reads`, from each layer's mode and type."""
        stored: dict[str, int] = {}  # by type, the layer whose keys and values are reused
        found: dict[int, int] = {}
        for place, (mode, name) in enumerate(zip(modes, names, strict=True)):
            if mode == "store":
                stored[name] = place
            elif mode == "reuse" and name in stored:
                found[place] = stored[name]
        return found

    def handing(
        self, given: dict[str, Any], shared: tuple[Tensor, Tensor] | None
    ) -> dict[str, Any]:
        return given | {_SHARED: _Pair(shared)} if _SHARED in given else given

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Raise UnsupportedError if a draft model asks for the keys and values that layers share:
        in an attached model, layers pass on keys and values of new tokens only."""
        if given.get("return_shared_kv_states"):
            raise UnsupportedError(
                "a draft model asks for the keys and values of all tokens, which stay in the "
                "slots of kvkeep's cache; call kvkeep.detach(model), or use no draft model"
            )
