"""Stretch: what a model's layers hold of a run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.layer.frozen import FrozenPlanes
from kvkeep.layer.history import LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Planes, Reach, plane_bytes


@final
class Stretch:
    """Encoded planes of each layer, (1, H|1, n, ...), of n tokens that follow each other."""

    def __init__(self, layers: Sequence[Planes], tokens: int) -> None:
        self.layers = [FrozenPlanes(planes) for planes in layers]
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane_bytes(planes) for planes in self.layers)

    def part(self, start: int, stop: int) -> Stretch:
        """A copy of some of the tokens."""
        return Stretch([_slots(planes, start, stop) for planes in self.layers], stop - start)

    @staticmethod
    def joined(stretches: Sequence[Stretch]) -> Stretch:
        """Those of tokens that follow each other, as one; a copy, if they are several."""
        if len(stretches) == 1:
            return stretches[0]
        layers = [
            {n: torch.cat([planes[n] for planes in runs], dim=2) for n in runs[0]}
            for runs in zip(*(stretch.layers for stretch in stretches), strict=True)
        ]
        return Stretch(layers, sum(map(len, stretches)))

    def to(self, devices: Sequence[torch.device]) -> Stretch:
        """The same on the device of each layer; not copied if it is there."""
        layers = [
            {n: planes[n].to(device) for n in planes}
            for planes, device in zip(self.layers, devices, strict=True)
        ]
        return Stretch(layers, self._tokens)

    def head(self, tokens: int) -> Stretch:
        """The first tokens, not copied."""
        return Stretch([planes.head(tokens) for planes in self.layers], tokens)


def why_not_kept(layer: LayerCache) -> str:
    """Why a layer's slots cannot be kept for other prompts; empty if they can.

    They can if they are what reading all its tokens gives, in their order, and depend on these
    alone.
    """
    if layer.ledger.apart:
        return "it joins texts that did not see each other; store each text by itself"
    return why_not_whole(layer)


def why_not_whole(layer: LayerCache) -> str:
    """Why a layer's slots are not those of all its tokens alone, in their order; empty if they
    are."""
    reason = _why_not_keepable(layer)
    if reason:
        return reason
    if layer.padded:
        return "its rows are padded; feed each text by itself"
    if layer.length < layer.fed or layer.rollback_limit < layer.fed:
        if layer.window is not None and layer.policy.reach == Reach(layer.window):
            return (
                f"{layer.fed} tokens were fed, and some of them evicted, for its sliding window "
                f"holds {layer.window}; keep texts as short as that"
            )
        return (
            f"{layer.fed} tokens were fed, and some of them evicted by policy "
            f"{layer.policy.name}; use a larger budget, or keep_all"
        )
    return ""


def _why_not_keepable(layer: LayerCache) -> str:
    if layer.policy.planes or layer.policy.ragged:
        return f"policy {layer.policy.name} keeps scores of one text with its slots; use keep_all"
    if not layer.key_codec.rewritable:
        return f"codec {layer.key_codec.name} encodes tokens together; use int8 or int8/int4"
    if not layer.storage.lasting:
        return f"{layer.storage.name} storage has no slots on the device to share; use @growing"
    return ""


def require_keepable(cache: Cache) -> None:
    """Raise UnsupportedError when a cache of its specs can never be kept for other prompts."""
    _require_none(cache, _why_not_keepable)


def require_kept(cache: Cache) -> None:
    """Raise UnsupportedError when what a cache holds cannot be kept for other prompts."""
    _require_none(cache, why_not_kept)


def require_whole(cache: Cache) -> None:
    """Raise UnsupportedError when a cache does not hold all its tokens, and them alone."""
    _require_none(cache, why_not_whole)


def _require_none(cache: Cache, why_not: Callable[[LayerCache], str]) -> None:
    for index, layer in enumerate(cache.layers):
        reason = why_not(layer)
        if reason:
            raise UnsupportedError(f"layer {index} cannot be stored: {reason}")


def stretch_of(states: Sequence[LayerState], start: int, stop: int, row: int = 0) -> Stretch:
    """A copy of what the layers of a cache hold of some tokens of a row. See `require_kept`."""
    slots = [state.parts["slots"] for state in states]
    return Stretch([_slots(planes, start, stop, row) for planes in slots], stop - start)


def _slots(planes: Planes, start: int, stop: int, row: int = 0) -> dict[str, Tensor]:
    return {n: plane[row : row + 1, :, start:stop].clone() for n, plane in planes.items()}
