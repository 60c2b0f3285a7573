"""Stretch: the slots of all layers for a run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.layer.frozen import FrozenPlanes
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Planes, concatenated, plane_bytes, slot_count
from kvkeep.store.geometry import LayerGeometry, ModelGeometry, window_in

Marks = Mapping[int, Mapping[str, Tensor]]
"""A number of tokens -> the recurrent states after them, by name."""


class Stretch:
    """Each layer's encoded planes, (1, H|1, S, ...), for n consecutive tokens of a text, and the
    recurrent states, (1, ...) each, after some of the tokens (`marks`). It never changes.

    A layer has a slot for each token, S = n, in ascending order of position. A layer with a sliding
    window may lack slots that had left the window when the text was stored.

    Args:
        first: the position of the first token.
    """

    def __init__(
        self, layers: Sequence[Planes], tokens: int, marks: Marks | None = None, first: int = 0
    ) -> None:
        self.layers = [FrozenPlanes(planes) for planes in layers]
        self.marks: Marks = marks or {}
        self.first = first
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.first + self._tokens

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all planes and states."""
        states = sum(x.nbytes for mark in self.marks.values() for x in mark.values())
        return sum(plane_bytes(planes) for planes in self.layers) + states

    def bytes_in(self, geometry: ModelGeometry) -> int:
        """Bytes that the slots and states should have."""
        pairs = zip(self.layers, geometry.layers, strict=True)
        slots = sum(slot_count(planes) * layer.slot_bytes for planes, layer in pairs)
        return slots + geometry.state_bytes * len(self.marks)

    def part(self, start: int, stop: int) -> Stretch:
        """A copy of tokens `start` to `stop`. States are shared, because they never change."""
        return Pieces([self])(self.first + start, self.first + stop)

    def to(self, devices: Sequence[torch.device], first: int) -> Stretch:
        """This stretch on the layers' devices, from position `first` on; a layer already on its
        device is not copied."""
        layers = [
            {n: planes[n].to(device) for n in planes}
            for planes, device in zip(self.layers, devices, strict=True)
        ]
        return Stretch(layers, self._tokens, self.marks, first)

    def marked(self, marks: Marks) -> Stretch:
        """This stretch with those of a text's states that are after its tokens; not copied."""
        new = marks_between(marks, self.first, self.stop)
        return Stretch(self.layers, self._tokens, {**self.marks, **new}, self.first)

    def lacking(self, other: Stretch) -> Stretch:
        """The slots that `other`, of the same tokens, has and this stretch lacks, copied."""
        layers = []
        for own, planes in zip(self.layers, other.layers, strict=True):
            new = ~torch.isin(planes[POSITION].flatten(), own[POSITION].flatten())
            layers.append({n: planes[n][:, :, new.to(planes[n].device)] for n in planes})
        return Stretch(layers, self._tokens, first=self.first)

    def with_slots(self, other: Stretch) -> Stretch:
        """This stretch with the slots of `other` added; layers that get slots are copied."""
        pairs = zip(self.layers, other.layers, strict=True)
        layers = [in_order(concatenated(a, b)) if slot_count(b) else a for a, b in pairs]
        return Stretch(layers, self._tokens, self.marks, self.first)

    def head(self, tokens: int) -> Stretch:
        """The first `tokens` tokens, not copied."""
        if tokens == len(self):
            return self
        stop = self.first + tokens
        layers = [planes.head(_slots(planes, self.first, stop)[1]) for planes in self.layers]
        return Stretch(layers, tokens, marks_between(self.marks, 0, tokens), self.first)

    def planes_between(self, index: int, first: int, stop: int) -> Planes:
        """The slots of layer `index` at positions `first` to `stop`, not copied."""
        planes = self.layers[index]
        start, end = _slots(planes, first, stop)
        return {n: planes[n].narrow(2, start, end - start) for n in planes}

    @property
    def whole(self) -> bool:
        """Whether every layer has a slot for each token."""
        return all(slot_count(planes) == len(self) for planes in self.layers)

    def why_not(self, index: int, layer: LayerGeometry, start: int) -> str:
        """Why the planes of layer `index` do not fit `layer` from position `start` on; empty if
        they do."""
        expected = torch.arange(start, start + len(self), dtype=torch.int32)
        if layer.window is not None:  # slots may be missing
            held = self.layers[index].get(POSITION, torch.empty(0)).flatten().cpu()
            expected = expected[torch.isin(expected, held)]
        return self.why_not_at(index, layer, expected)

    def why_not_at(self, index: int, layer: LayerGeometry, positions: Tensor) -> str:
        """Why layer `index` does not hold slots of `layer` at exactly these positions, int32 (n,);
        empty if it does."""
        planes = self.layers[index]
        if reason := layer.why_not(planes, layer.of_row.heads, len(positions)):
            return reason
        if not planes[POSITION].flatten().cpu().equal(positions):
            return f" has positions other than {_extent(positions)}"
        return ""


class Pieces(NamedTuple):
    """Consecutive stretches of a text, in order, from which parts can be copied."""

    stretches: Sequence[Stretch]

    @property
    def marks(self) -> Marks:
        """The recurrent states, by number of the text's tokens."""
        return {x.first + at: mark for x in self.stretches for at, mark in x.marks.items()}

    def __call__(self, start: int, stop: int) -> Stretch:
        """A copy of tokens `start` to `stop` of the text, with their marks."""
        layers = [
            {name: torch.cat([planes[name] for planes in runs], dim=2) for name in runs[0]}
            for runs in zip(*self._within(start, stop), strict=True)
        ]
        return Stretch(layers, stop - start, marks_between(self.marks, start, stop), start)

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of the slots of tokens `start` to `stop`."""
        return sum(plane_bytes(p) for runs in self._within(start, stop) for p in runs)

    def whole(self, start: int, stop: int) -> bool:
        """Whether every layer has a slot for each of the tokens `start` to `stop`."""
        layers = range(len(self.stretches[0].layers))
        return all(self.held(index, start, stop) == stop - start for index in layers)

    def held(self, index: int, start: int, stop: int) -> int:
        """The number of slots of layer `index` at positions `start` to `stop`."""
        return sum(slot_count(one.planes_between(index, start, stop)) for one in self.stretches)

    def slots(self, index: int, ranges: Iterable[tuple[int, int]]) -> Planes:
        """A copy of the slots of layer `index` at the positions of ranges [first, stop), in order;
        missing slots are left out."""
        runs = [x.planes_between(index, *one) for one in ranges for x in self.stretches]
        runs = runs or [self.stretches[0].planes_between(index, 0, 0)]
        return {name: torch.cat([planes[name] for planes in runs], dim=2) for name in runs[0]}

    def _within(self, start: int, stop: int) -> Iterator[Sequence[Planes]]:
        for stretch in self.stretches:
            if start < stretch.stop and stretch.first < stop:
                bounds = [_slots(planes, start, stop) for planes in stretch.layers]
                yield [
                    {n: p[n][:, :, a:b] for n in p}
                    for p, (a, b) in zip(stretch.layers, bounds, strict=True)
                ]


def _extent(positions: Tensor) -> str:
    return f"{positions[0]} to {positions[-1]}" if len(positions) else "none"


def _slots(planes: Planes, start: int, stop: int) -> tuple[int, int]:
    """The slots at positions `start` to `stop`, as the first and the end of a range."""
    position = planes[POSITION].flatten()
    borders = torch.tensor([start, stop], dtype=position.dtype, device=position.device)
    first, end = torch.searchsorted(position, borders).tolist()
    return first, end


def in_order(planes: Planes) -> Planes:
    """Slots in ascending order of position, without empty slots, copied."""
    position = planes[POSITION].flatten()
    order = position.argsort()[int((position < 0).sum()) :]
    return {n: planes[n].index_select(2, order.to(planes[n].device)) for n in planes}


def why_not_kept(layer: LayerCache) -> str:
    """Why a layer's slots cannot be stored for other prompts; empty if they can.

    Slots can be stored if one forward of all tokens computes the same slots, in order.
    """
    if layer.history.joined:
        return "it joins texts that were computed separately; store each text by itself"
    return why_not_whole(layer, of_window=True)


def why_not_whole(layer: LayerCache, *, of_window: bool = False) -> str:
    """Why a layer does not hold the slots of all fed tokens, in order; empty if it does.

    Args:
        of_window: in a layer with a sliding window, the slots that the next token sees are enough.
    """
    if reason := why_not_keepable(layer):
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
        if window_in(layer) is not None:
            if of_window:
                return ""
            return (
                f"{layer.fed} tokens were fed, and some were evicted because its sliding window "
                f"holds {layer.window}; store only texts that fit in the window"
            )
        return (
            f"{layer.fed} tokens were fed, and policy {layer.policy.name} evicted some of them; "
            "use a larger budget, or keep_all"
        )
    return ""


def why_not_keepable(layer: LayerCache) -> str:
    """Why a layer of this spec can never be stored; empty if it can."""
    if layer.policy.ragged and layer.policy.compression is None:
        return f"policy {layer.policy.name} keeps different tokens in each head; use keep_all"
    if not layer.key_codec.rewritable:
        return (
            f"codec {layer.key_codec.name} encodes several tokens together; use int8 or int8/int4"
        )
    if layer.policy.compression is None and (layer.key_codec.centre or layer.slots.late):
        return f"codec {layer.key_codec.name} encodes keys depending on their text; use keep_all"
    if not layer.slots.storage.lasting:
        return (
            f"{layer.slots.storage.name} storage has no slots on the device to share; use @growing"
        )
    return ""


def require_storable(cache: Cache, why_not: Callable[[LayerCache], str]) -> None:
    """Raise UnsupportedError if there is a reason `why_not` to store some layer of a cache."""
    for index, layer in enumerate(cache.layers):
        if reason := why_not(layer):
            raise UnsupportedError(f"layer {index} cannot be stored: {reason}")


def stored_slots(cache: Cache, row: int = 0) -> Stretch:
    """A row's slots for a store, without the policy's scores, and its recurrent states at the marks
    of the cache. See `why_not_kept`."""
    found: list[Planes] = []
    cache.mend("store")
    for layer in cache.layers:
        planes = layer.state().parts["slots"]
        stored = {n: planes[n][row : row + 1] for n in planes if n not in layer.policy.planes}
        stored |= {POSITION: stored[POSITION][:, :1]}
        found.append(stored if window_in(layer) is None else in_order(stored))
    marks = {
        at: {name: x if len(x) == 1 else x[row : row + 1].clone() for name, x in mark.items()}
        for at, mark in cache.carried.marks.items()
    }
    return Stretch(found, cache.fed, marks)


def marks_between(marks: Marks, start: int, stop: int) -> Marks:
    """The marks after tokens `start` to `stop`, counted from `start`."""
    return {at - start: mark for at, mark in marks.items() if start < at <= stop}
