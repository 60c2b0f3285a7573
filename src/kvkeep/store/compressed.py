"""Compressed: the slots that a compressed text keeps, which stores hold as one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

import torch
from torch import Tensor

from kvkeep.geometry import Geometry
from kvkeep.host import ModelCache
from kvkeep.layer.history import History, LayerState
from kvkeep.planes import POSITION
from kvkeep.store.geometry import LayerGeometry, ModelGeometry


@final
class Compressed:
    """Each layer's encoded planes, (1, H|1, slots, ...), by the names of a part and a plane, such
    as `head.0.k`. Heads keep different tokens, so it has no parts for some of the tokens.

    Args:
        tokens: how many were fed.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], tokens: int) -> None:
        self.layers = list(layers)
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(x.nbytes for planes in self.layers for x in planes.values())

    @classmethod
    def of(cls, cache: ModelCache) -> Compressed:
        """A copy of the slots of a compressed cache of one row."""
        layers = [
            {
                f"{part}.{name}": planes[name].clone()
                for part, planes in it.items()
                for name in planes
            }
            for it in (state.parts for state in cache.states("store"))
        ]
        return cls(layers, cache.fed)

    def state(self, index: int, geometry: Geometry) -> LayerState:
        """The state of a layer that holds it; the tensors are not copied.

        Args:
            geometry: of one row of the layer.
        """
        history = History()
        history.columns = history.floor = len(self)
        history.geometry = geometry
        parts: dict[str, dict[str, Tensor]] = {}
        for name, x in self.layers[index].items():
            part, _, plane = name.rpartition(".")
            parts.setdefault(part, {})[plane] = x
        return LayerState(history, parts).to(geometry.device)

    def why_not(self, geometry: ModelGeometry) -> str:
        """Why layers of this geometry cannot hold it; empty if they can."""
        if len(self.layers) != len(geometry.layers):
            return f"it has {len(self.layers)} layers, not {len(geometry.layers)}"
        for index, layer in enumerate(geometry.layers):
            reason = self._why_not(index, layer)
            if reason:
                return f"layer {index} {reason}"
        return ""

    def _why_not(self, index: int, layer: LayerGeometry) -> str:
        heads, specs, ragged = layer.of_row.heads, layer.planes, layer.ragged
        own = {f"head.{head}" for head in range(heads)} if ragged else {"slots"}
        parts = self.state(index, layer.of_row._replace(device=torch.device("cpu"))).parts
        if parts.keys() != own:
            return f"has parts {sorted(parts)}, not {sorted(own)}"
        for name, planes in parts.items():
            if planes.keys() != specs.keys():
                return f"{name} has planes {sorted(planes)}, not {sorted(specs)}"
            slots = planes[POSITION].shape[2] if planes[POSITION].dim() == 3 else 0
            if slots < 1:
                return f"{name} holds no token"
            for plane, spec in specs.items():
                shape = (1, 1 if spec.shared or ragged else heads, slots, *spec.shape)
                x = planes[plane]
                if (tuple(x.shape), x.dtype) != (shape, spec.dtype):
                    return f"{name}.{plane} is {tuple(x.shape)} {x.dtype}, not {shape} {spec.dtype}"
            position = planes[POSITION].flatten().sort().values
            if slots and not (0 <= int(position[0]) <= int(position[-1]) < len(self)):
                return f"{name} has positions outside of its {len(self)} tokens"
            if bool((position[1:] == position[:-1]).any()):
                return f"{name} holds a token twice"
        return ""


@dataclass
class CompressedText:
    """A text that a store holds compressed: its token ids, int64 (n,), and its slots."""

    tokens: Tensor
    content: Compressed
    geometry: ModelGeometry
    priority: int = 0
    used: int = 0

    def fill(self, cache: ModelCache) -> None:
        """Copy it into an empty cache of the same specs."""
        for index, (layer, own) in enumerate(zip(cache.layers, self.geometry.of_rows, strict=True)):
            layer.restore(self.content.state(index, own))
        cache.routed = self.geometry.routed


class CompressedTexts:
    """The compressed texts of a store, by identity."""

    def __init__(self, clock: count[int]) -> None:
        self._clock = clock
        self._texts: dict[str, list[CompressedText]] = {}

    def all(self) -> list[CompressedText]:
        """All texts."""
        return [text for texts in self._texts.values() for text in texts]

    @property
    def nbytes(self) -> int:
        """Bytes of all texts' slots."""
        return sum(text.content.nbytes for text in self.all())

    def find(self, identity: str, tokens: Tensor, least: int) -> CompressedText | None:
        """The longest text, of at least so many tokens, with which tokens (n,) begin; None: there
        is none."""
        known = self._texts.get(identity, [])
        fitting = [
            text for text in known if len(text.tokens) >= least and begins(tokens, text.tokens)
        ]
        best = max(fitting, key=lambda text: len(text.tokens), default=None)
        if best is not None:
            best.used = next(self._clock)
        return best

    def add(self, identity: str, text: CompressedText, priority: int) -> None:
        """Hold one more text."""
        text.priority, text.used = priority, next(self._clock)
        self._texts.setdefault(identity, []).append(text)

    def remove(self, text: CompressedText) -> int:
        """Forget a text; the bytes that this frees."""
        for identity, texts in self._texts.items():
            if any(one is text for one in texts):
                self._texts[identity] = [one for one in texts if one is not text]
                return text.content.nbytes
        return 0


def begins(tokens: Tensor, with_these: Tensor) -> bool:
    """Whether tokens (n,) begin with others."""
    return len(with_these) <= len(tokens) and tokens[: len(with_these)].equal(with_these)
