"""Layers with all state in tensors, for programs that outlive the process that traces them.

A step is one operation on these tensors: it builds a layer around them, runs `LayerCache.run`, and
writes the changed state back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kvkeep.errors import StateError, UnsupportedError
from kvkeep.files.headers import typed
from kvkeep.geometry import Geometry
from kvkeep.graph.custom_ops import INPUTS, ON_HOST, like_step, operator, run
from kvkeep.layer.history import History
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.stats import slot_planes
from kvkeep.layer.step import StepInputs
from kvkeep.policy import Need
from kvkeep.spec import CacheSpec

_COUNTS = ("columns", "floor", "slots")
_Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Description:
    """A recipe for building a layer.

    Args:
        spec: the spec as text, with fixed storage.
        capacity: number of slots.
        index, count: index of the layer, and number of layers of the model.
        window: the layer's own sliding window in tokens; None: no window.
        chunked: whether the window begins at a multiple of its size.
        slopes: the layer's slopes; empty: no slopes.
        latent: the width of values that are elements of keys; 0: values are separate.
        readers: number of layers that read this one after each step.
    """

    spec: str
    capacity: int
    index: int
    count: int
    window: int | None
    chunked: bool = False
    slopes: list[float] = field(default_factory=list)
    latent: int = 0
    readers: int = 0

    def build(self) -> LayerCache:
        """Build an empty layer, whose keys have no centre: a program's state holds none."""
        spec = CacheSpec.parse(self.spec)
        if spec.key_codec.centre:
            spec = replace(spec, key_codec=replace(cast(Any, spec.key_codec), centre=0))
        layer = spec.layer(
            index=self.index,
            count=self.count,
            window=self.window,
            chunked=self.chunked,
            capacity=self.capacity,
            slopes=tuple(self.slopes) or None,
            latent=self.latent or None,
            readers=self.readers,
        )
        layer.cursor.holes_after = self.holes_after
        return layer

    def tensors(self, layer: LayerCache, known: Geometry) -> dict[str, _Form]:
        """The shape and dtype of each tensor of a layer's state: its planes, then `counts` and
        `pads`."""
        planes = slot_planes(layer.policy, layer.key_codec, layer.value_codec, known)
        rows, slots, found = known.rows, layer.slots.limit or 0, dict[str, _Form]()
        for name, spec in planes.items():
            heads = 1 if spec.shared else known.heads
            found[name] = (rows, heads, slots, *spec.shape), spec.dtype
        found["counts"] = (len(_COUNTS),), torch.int64
        return found | {"pads": ((rows,), torch.int64)}

    @property
    def holes_after(self) -> int | None:
        """See `LayerCache.holes_after`."""
        return None if self.window is None else 0


def require_exportable(spec: CacheSpec) -> None:
    """Check that the state of a layer with this spec fits tensors of a fixed shape.

    Raises:
        UnsupportedError: the state grows, or the policy reads a file.
    """
    policy, own = spec.policy, str(spec).partition("@")[0]
    reason = ""
    if Need.ROTARY in policy.needs:
        reason = f"the state of policy {policy.name} grows; use another, such as snapkv"
    elif policy.file is not None:
        reason = f"policy {policy.name} reads a file, and programs open none; use another policy"
    elif policy.ragged:
        reason = f"policy {policy.name} divides slots among heads; use another, such as h2o"
    elif not spec.storage.limited:
        room = "" if policy.budget else ":4096"
        reason = f"its slots grow; use fixed storage, as {own}@fixed{room}"
    if reason:
        raise UnsupportedError(f"{spec} cannot be exported: {reason}")


class LayerTensors(nn.Module):
    """A layer's state as buffers: its planes, (B, H|1, capacity, ...) each; `counts`, int64 (3,):
    columns, floor and slots; and `pads`, int64 (B,): each row's padding.

    Args:
        description: how to build the layer.
        like: a layer with at least one token, whose geometry is used.

    Raises:
        UnsupportedError: the state does not fit tensors of a fixed shape.
    """

    on_device = False
    readers: int

    def __init__(self, description: Description, like: LayerCache) -> None:
        super().__init__()
        layer = description.build()
        self.readers = description.readers
        require_exportable(CacheSpec.parse(description.spec))
        known = like.history.geometry
        assert known is not None
        specs = description.tensors(layer, known)
        *planes, _, _ = specs
        self.text = json.dumps(asdict(description) | {"planes": planes})
        for name, (shape, dtype) in specs.items():
            device = known.device if name in planes else None
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    @property
    def fed(self) -> Tensor:
        """Columns fed, int64 ()."""
        return cast(Tensor, self.counts)[0]

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the next n tokens, int32 (B, n); -1 where `real`, bool (B, n), is False."""
        history: Any = History()  # the fields are symbolic tensors
        history.columns, history.pads = self.fed, self.pads
        if real is None:
            real = torch.ones(len(history.pads), n, dtype=torch.bool, device=device)
        holes_after = described(self.text)[0].holes_after
        return cast(Tensor, history.next_positions(n, device, real, holes_after))

    def run(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.run`, with position int32 (B, n)."""
        return cast(Tensor, step_in(list(self.buffers()), self.text, *inputs.in_graph))

    def read(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.read`."""
        return cast(Tensor, read_in(list(self.buffers()), self.text, *inputs.in_graph))


@lru_cache(maxsize=1024)
def described(text: str) -> tuple[Description, list[str]]:
    """A layer's description, and the names of its planes, from their JSON.

    Raises:
        ValueError, TypeError, KeyError: the JSON is malformed.
    """
    fields = json.loads(text)
    names = fields.pop("planes")
    return typed(Description, fields), names


_SCHEMA = f"(Tensor(a!)[] state, str text, {INPUTS}) -> Tensor"


def _fake(state: Sequence[Tensor], text: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return like_step(q, v)


@operator(f"step_in{_SCHEMA}", _fake, ON_HOST)
def step_in(state: Sequence[Tensor], text: str, *inputs: Any) -> Tensor:
    """`LayerTensors.run`: `state`: its buffers in order; `text`: its description as JSON."""
    description, names = described(text)
    asked, (*planes, counts, pads) = StepInputs(*inputs), state
    if len(planes) != len(names):
        raise StateError(
            f"{len(state)} tensors, but a layer has {names}, counts and pads; "
            "export the model again"
        )
    if counts not in _layers:
        _layers[counts] = description.build()
    layer: LayerCache = _layers[counts]
    history = History()
    history.columns, history.floor, slots = counts.tolist()
    history.pads = pads.to(asked.k.device) if bool(pads.any()) else None
    history.geometry = Geometry.of(asked.k, asked.v) if history.columns else None
    layer.cursor.adopt_planes(history, dict(zip(names, planes, strict=True)), slots)
    out = run(layer, asked)
    if layer.history.pads is not None:
        pads.copy_(layer.history.pads)
    _count(layer, counts)
    return out


def _count(layer: LayerCache, counts: Tensor) -> None:
    """Record the counts of a layer; -1 columns until all readings are done, so that a step which is
    interrupted before them is noticed."""
    history = layer.history
    columns = -1 if layer.cursor.unread else history.columns
    counts.copy_(torch.tensor([columns, history.floor, layer.length]))


@operator(f"read_in{_SCHEMA}", _fake, ON_HOST)
def read_in(state: Sequence[Tensor], text: str, *inputs: Any) -> Tensor:
    """`LayerTensors.read`, after `step_in` with the same state and text. The last reading evicts,
    which changes the state."""
    counts = state[-2]
    if counts not in _layers:
        raise StateError("a layer is read before its step was made; export the model again")
    layer: LayerCache = _layers[counts]
    out: Tensor = layer.read(StepInputs(*inputs))
    _count(layer, counts)
    return out


_layers = WeakTensorKeyDictionary()  # layers by `counts`; each step loads a layer's state
