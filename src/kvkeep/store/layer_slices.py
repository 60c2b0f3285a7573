"""Stretch: the slots of all layers for a run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.layer.frozen import FrozenPlanes
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Planes, Reach, plane_bytes
from kvkeep.store.geometry import LayerGeometry

Marks = Mapping[int, Mapping[str, Tensor]]
"""A number of tokens -> the recurrent states after them, by name."""


@final
class Stretch:
    """Each layer's encoded planes, (1, H|1, n, ...), for n consecutive tokens, and the recurrent
    states, (1, ...) each, after some of the tokens (`marks`). It never changes."""

    def __init__(self, layers: Sequence[Planes], tokens: int, marks: Marks | None = None) -> None:
        self.layers = [FrozenPlanes(planes) for planes in layers]
        self.marks: Marks = marks or {}
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all planes and states."""
        states = sum(x.nbytes for mark in self.marks.values() for x in mark.values())
        return sum(plane_bytes(planes) for planes in self.layers) + states

    def part(self, start: int, stop: int) -> Stretch:
        """A copy of tokens `start` to `stop`. States are shared, because they never change."""
        return pieces_of([self], self.marks)(start, stop)

    def to(self, devices: Sequence[torch.device]) -> Stretch:
        """This stretch on the layers' devices; a layer on its device is not copied."""
        layers = [
            {n: planes[n].to(device) for n in planes}
            for planes, device in zip(self.layers, devices, strict=True)
        ]
        return Stretch(layers, self._tokens, self.marks)

    def marked(self, marks: Marks) -> Stretch:
        """This stretch with further states; nothing is copied."""
        return Stretch(self.layers, self._tokens, {**self.marks, **marks})

    def head(self, tokens: int) -> Stretch:
        """The first `tokens` tokens, not copied."""
        layers = [planes.head(tokens) for planes in self.layers]
        return Stretch(layers, tokens, marks_between(self.marks, 0, tokens))

    def why_not(self, index: int, layer: LayerGeometry, start: int) -> str:
        """Why layer `index` cannot hold its planes from position `start` on; empty if it can."""
        planes, stop = self.layers[index], start + len(self)
        reason = layer.why_not(planes, layer.of_row.heads, len(self))
        if reason:
            return reason
        if not planes[POSITION].flatten().cpu().equal(torch.arange(start, stop, dtype=torch.int32)):
            return f" has positions other than {start} to {stop - 1}"
        return ""


def why_not_kept(layer: LayerCache) -> str:
    """Why a layer's slots cannot be stored for other prompts; empty if they can.

    Slots can be stored if one forward of all tokens computes the same slots, in order.
    """
    if layer.history.joined:
        return "it joins texts that were computed separately; store each text by itself"
    return why_not_whole(layer)


def why_not_whole(layer: LayerCache) -> str:
    """Why a layer does not hold the slots of all fed tokens, in order; empty if it does."""
    reason = _why_not_keepable(layer)
    if reason:
        return reason
    if layer.history.embedded:
        return (
            "it was fed images, sound, embeddings or keys computed elsewhere, which token ids do "
            "not identify; feed the prompt again instead"
        )
    if layer.policy.ragged:
        return f"policy {layer.policy.name} stores compressed texts; use keep_all"
    if layer.padded:
        return "its rows are padded; feed one text at a time"
    if layer.length < layer.fed or layer.history.floor:
        if layer.window is not None and layer.policy.reach == Reach(layer.window):
            return (
                f"{layer.fed} tokens were fed, and some were evicted because its sliding window "
                f"holds {layer.window}; store only texts as short as that"
            )
        return (
            f"{layer.fed} tokens were fed, and policy {layer.policy.name} evicted some of them; "
            "use a larger budget, or keep_all"
        )
    return ""


def _why_not_keepable(layer: LayerCache) -> str:
    if layer.policy.ragged and layer.policy.compression is None:
        return f"policy {layer.policy.name} keeps different tokens in each head; use keep_all"
    if not layer.key_codec.rewritable:
        return (
            f"codec {layer.key_codec.name} encodes several tokens together; use int8 or int8/int4"
        )
    if layer.policy.compression is None and (layer.key_codec.centre or layer.slots.block > 1):
        return f"codec {layer.key_codec.name} takes out the mean of a text's own keys; use keep_all"
    if not layer.storage.lasting:
        return f"{layer.storage.name} storage keeps no slots on the device to share; use @growing"
    return ""


def require_keepable(cache: Cache) -> None:
    """Raise UnsupportedError if a cache of this spec can never be stored."""
    _require_none(cache, _why_not_keepable)


def require_kept(cache: Cache) -> None:
    """Raise UnsupportedError if a cache's present tokens cannot be stored."""
    _require_none(cache, why_not_kept)


def require_whole(cache: Cache) -> None:
    """Raise UnsupportedError if a cache does not hold exactly the fed tokens."""
    _require_none(cache, why_not_whole)


def _require_none(cache: Cache, why_not: Callable[[LayerCache], str]) -> None:
    for index, layer in enumerate(cache.layers):
        reason = why_not(layer)
        if reason:
            raise UnsupportedError(f"layer {index} cannot be stored: {reason}")


def stored_slots(cache: Cache, row: int = 0) -> Stretch:
    """A row's slots for a store, not copied, without the policy's scores. See `require_kept`."""
    found: list[Planes] = []
    for layer, state in zip(cache.layers, cache.states("store"), strict=True):
        planes = state.parts["slots"]
        stored = {n: planes[n][row : row + 1] for n in planes if n not in layer.policy.planes}
        found.append(stored | {POSITION: stored[POSITION][:, :1]})
    return Stretch(found, cache.fed)


def pieces_of(
    stretches: Sequence[Stretch], marks: Marks, first: int = 0
) -> Callable[[int, int], Stretch]:
    """A function that copies tokens `start` to `stop` of a text, with their marks.

    Args:
        stretches: consecutive stretches of the text's tokens from `first` on.
        marks: by numbers of the text's tokens.
    """

    def content_of(start: int, stop: int) -> Stretch:
        parts, begin = list[Sequence[Planes]](), first
        for stretch in stretches:
            a, b = max(start, begin) - begin, min(stop, begin + len(stretch)) - begin
            if a < b:
                parts.append([{n: p[n][:, :, a:b] for n in p} for p in stretch.layers])
            begin += len(stretch)
        layers = [
            {name: torch.cat([planes[name] for planes in runs], dim=2) for name in runs[0]}
            for runs in zip(*parts, strict=True)
        ]
        return Stretch(layers, stop - start, marks_between(marks, start, stop))

    return content_of


def marks_of(cache: Cache, row: int = 0) -> Marks:
    """The recurrent states of a row, at the marks of a cache."""
    return {
        at: {name: x if len(x) == 1 else x[row : row + 1].clone() for name, x in mark.items()}
        for at, mark in cache.carried.marks.items()
    }


def marks_between(marks: Marks, start: int, stop: int) -> Marks:
    """The marks after tokens `start` to `stop`, counted from `start`."""
    return {at - start: mark for at, mark in marks.items() if start < at <= stop}
