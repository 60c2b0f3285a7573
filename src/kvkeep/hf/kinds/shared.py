"""Models in which a layer attends to the keys and values of an earlier one (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature, Lacks, unsupported
from kvkeep.hf.config import refused
from kvkeep.hf.kinds.base import Kind
from kvkeep.host import LayerKind


class Shared(Kind):
    """The layer that has slots makes its step, and then others read them; see `Settling`."""

    lacks: ClassVar[Lacks] = unsupported(
        "has layers that reuse the keys and values of others",
        Feature.REREAD,
        Feature.GRAPHED,
        Feature.TRAINED,
        Feature.NARROWED,
    )

    def has(self, text: PreTrainedConfig) -> bool:
        return "reuse" in (getattr(text, "kv_sharing_modes", None) or ())

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Layers that reuse others' keys and values have none of their own.

        Raises:
            UnsupportedError: a layer reuses those of a layer that comes later, or in another way.
        """
        modes = getattr(text, "kv_sharing_modes", None) or [None] * len(names)
        found = list(layers)
        stored: dict[str, int] = {}  # the layer whose keys and values are reused, for each type
        for place, (mode, name) in enumerate(zip(modes, names, strict=True)):
            if mode == "reuse" and name in stored:
                own = found[stored[name]]
                if own is not None:
                    found[stored[name]] = replace(own, readers=own.readers + 1)
                found[place] = None
            elif mode == "store":
                stored[name] = place
            elif mode is not None:
                raise refused(
                    text, f"layer {place} shares keys and values in an unknown way, {mode}"
                )
        return found

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Raise UnsupportedError if a model that drafts is to be given the keys and values that
        layers share: those that an attached model hands from layer to layer are the new tokens'."""
        if given.get("return_shared_kv_states"):
            raise UnsupportedError(
                "a drafting model asks for the keys and values of all tokens, which stay in the "
                "slots of kvkeep's cache; call kvkeep.detach(model), or generate without it"
            )
