"""Messages between processes that share a text: a layer's slots and their gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.files.offload import Offload
from kvkeep.geometry import Geometry
from kvkeep.layer.history import History, LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.train.slots import HeldSlots, Slots

_MEMORY = "memory"


class Message(NamedTuple):
    """Named tensors, and plain values that describe them."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def head(self) -> Tensor:
        """The message without the tensors' data, as bytes: uint8 (n,)."""
        kinds = {name: [str(x.dtype), *x.shape] for name, x in self.tensors.items()}
        text = json.dumps([self.about, kinds])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def described(cls, head: Tensor) -> Message:
        """The inverse of `head`: a message with tensors on device `meta`."""
        about, kinds = json.loads(head.cpu().numpy().tobytes())
        return cls(about, {name: empty(shape, dtype) for name, (dtype, *shape) in kinds.items()})


def empty(shape: int | Sequence[int], dtype: str) -> Tensor:
    """A tensor without data; `dtype` is named as in "torch.int64"."""
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(shape, dtype=kind, device="meta")


def of_layer(state: LayerState) -> Message:
    """A layer's state after some chunks, from which the forward of the next chunks continues."""
    history = state.history
    assert history.geometry is not None
    *sizes, dtype, _device = history.geometry
    tensors = {
        f"{part}.{name}": planes[name] for part, planes in state.parts.items() for name in planes
    }
    tensors |= {f"{_MEMORY}.{name}": x for name, x in history.memory.items()}
    return Message({"floor": history.floor, "sizes": sizes, "dtype": str(dtype)}, tensors)


def layer_state(message: Message, history: History) -> LayerState:
    """The inverse of `of_layer`. `history`: the record of the columns fed, which is completed."""
    dtype = empty(0, message.about["dtype"]).dtype
    history.floor = message.about["floor"]
    rows, heads, keys, values = message.about["sizes"]
    history.geometry = Geometry(rows, heads, keys, values, dtype)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, x in message.tensors.items():
        part, _, plane = name.rpartition(".")
        parts.setdefault(part, {})[plane] = x
    history.memory = parts.pop(_MEMORY, {})
    return LayerState(history, parts)


def of_slots(slots: Slots) -> Message:
    """A layer's slots after some chunks, from which the backward of the next chunks starts."""
    return Message({"encoded": slots.encoded}, slots.past._asdict())


def slots_from(message: Message, store: Offload, layer: LayerCache) -> Slots:
    """The inverse of `of_slots`."""
    return Slots(store, layer, HeldSlots(**message.tensors), message.about["encoded"])


def of_gradients(slots: Slots) -> Message:
    """The gradients of a layer's slots: keys (B, H, S, Dk) and values (B, H, S, Dv)."""
    return Message({}, dict(zip(("keys", "values"), slots.gradients, strict=True)))
