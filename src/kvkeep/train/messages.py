"""Messages between processes that share a text: a layer's slots, its states, and their
gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Held
from kvkeep.files.offload import Offload
from kvkeep.geometry import Geometry
from kvkeep.layer.history import MEMORY, History, LayerState, by_part
from kvkeep.layer.layer import LayerCache
from kvkeep.train.slots import Slots


class Message(NamedTuple):
    """Named tensors, plain values that describe them, and a layer's recurrent states, or their
    gradients."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]
    states: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def head(self) -> Tensor:
        """The message without the tensors' data, as bytes: uint8 (n,)."""
        kinds = [
            {name: [str(x.dtype), *x.shape] for name, x in some.items()}
            for some in (self.tensors, self.states)
        ]
        text = json.dumps([self.about, *kinds])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def described(cls, head: Tensor) -> Message:
        """The inverse of `head`: a message with tensors on device `meta`."""
        about, *kinds = json.loads(head.cpu().numpy().tobytes())
        tensors, states = (
            {name: empty(shape, dtype) for name, (dtype, *shape) in some.items()} for some in kinds
        )
        return cls(about, tensors, states)

    @property
    def data(self) -> list[Tensor]:
        """All tensors, in order."""
        return [*self.tensors.values(), *self.states.values()]

    def filled(self, data: Iterator[Tensor]) -> Message:
        """The message with other tensors, in the order of `data`."""
        tensors = {name: next(data) for name in self.tensors}
        return self._replace(tensors=tensors, states={name: next(data) for name in self.states})


def empty(shape: int | Sequence[int], dtype: str) -> Tensor:
    """A tensor without data; `dtype` is named as in "torch.int64"."""
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(shape, dtype=kind, device="meta")


def of_layer(state: LayerState) -> Message:
    """A layer's state after some chunks, from which the forward of the next chunks continues."""
    history = state.history
    assert history.geometry is not None
    *sizes, dtype, _device = history.geometry
    about = {"floor": history.floor, "sizes": sizes, "dtype": str(dtype)}
    return Message(about, state.tensors())


def layer_state(message: Message, history: History) -> LayerState:
    """The inverse of `of_layer`. `history`: the record of the columns fed, which is completed."""
    dtype = empty(0, message.about["dtype"]).dtype
    history.floor = message.about["floor"]
    rows, heads, keys, values = message.about["sizes"]
    history.geometry = Geometry(rows, heads, keys, values, dtype)
    parts = by_part(message.tensors)
    history.memory = parts.pop(MEMORY, {})
    return LayerState(history, parts)


def of_slots(slots: Slots | None) -> Message:
    """A layer's slots after some chunks, from which the backward of the next chunks starts; None:
    it has none."""
    if slots is None:
        return Message({}, {})
    keys, values, position, _ = slots.past
    tensors = {"keys": keys, "values": values, "position": position}
    return Message({"encoded": slots.encoded}, tensors)


def slots_from(message: Message, store: Offload, layer: LayerCache) -> Slots:
    """The inverse of `of_slots`."""
    return Slots(store, layer, Held(**message.tensors), message.about["encoded"])


def of_gradients(slots: Slots | None) -> Message:
    """The gradients of a layer's slots: keys (B, H, S, Dk) and values (B, H, S, Dv)."""
    found = () if slots is None else zip(("keys", "values"), slots.gradients, strict=True)
    return Message({}, dict(found))
