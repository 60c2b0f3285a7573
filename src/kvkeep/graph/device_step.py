"""DeviceStep: a layer's decode step with all state in tensors on the device of its slots.

A step reads nothing from the host: the cursor, the slot counts and the victim are tensors, so one
CUDA graph serves all later steps. With a budget, each token goes to the slot that the previous step
freed.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from kvkeep.attention import Centre, Segment, View
from kvkeep.errors import CapacityError, SpecError, StateError, UnsupportedError
from kvkeep.graph.custom_ops import Ticket, step
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs, driven, phases, require_causal
from kvkeep.layer.write_tokens import write
from kvkeep.planes import POSITION, unsliced
from kvkeep.policy import Need, Observation
from kvkeep.storage.base import require_within

_CPU = torch.device("cpu")
_MOST_STEPS = 32768
"""Number of steps for which a layer with a budget computes rotary turns of centres in advance."""


class Cursors:
    """The cursors of layers that evict nothing. Layers that hold the same number of slots share one
    cursor, so that a model's step advances it once.

    Args:
        columns: columns fed, int64 () on the device.
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def at(self, held: int) -> tuple[Tensor, Tensor]:
        """The cursor of layers that hold `held` slots: the index of the next token's slot, int64
        (1, 1, 1), and the number of slots in use including it, int32 ()."""
        if held not in self._held:
            device = self.columns.device
            with torch.inference_mode(False):
                self._held[held] = (
                    torch.full((1, 1, 1), held, device=device),
                    torch.tensor(held + 1, dtype=torch.int32, device=device),
                )
        return self._held[held]

    def advance(self) -> None:
        """Advance all cursors by one token; call it once after each step of the model."""
        self.columns.add_(1)
        for pair in self._held.values():
            for number in pair:
                number.add_(1)


class DeviceStep:
    """Decode steps (one token per row) of a layer that holds a prompt, until `close`.

    Args:
        layer: a layer with fixed or growing storage; do not use it before `close`.
        cursors: the cursors of all layers; the caller advances them after each step.
        tokens: number of tokens that growing storage makes room for; None: the storage must be
            fixed.

    Raises:
        StateError: the layer holds no prompt, or an eviction waits for a crop.
        SpecError: the storage moves its slots, or has no slot for a token beyond the budget.
        UnsupportedError: the policy or codec needs the host, or tensors whose shapes change.
        OutOfMemoryError: there is no memory for `tokens` tokens.
    """

    on_device, readers = True, 0
    padded = True  # host code never reads positions

    def __init__(self, layer: LayerCache, cursors: Cursors, tokens: int | None = None) -> None:
        require_fitting(layer, tokens)
        self.policy, self.slopes = layer.policy, layer.slopes
        policy = layer.policy
        self._evicts = policy.budget is not None
        if self._evicts:
            layer.slots.thaw()  # slots shared with forks cannot be evicted
        self._slots = _slots_of(layer, tokens)
        layer.slots.storage.reserve(self._slots)
        self._layer, self._columns = layer, cursors.columns
        self._fed, self._held = layer.fed, layer.slots.storage.length
        self._history = layer.history
        self._pads = self._history.pads
        held, room = self._history.centre, _MOST_STEPS if self._evicts else self._slots
        self.centre: Centre | None = None
        if held is not None:
            self.centre = Centre(held, layer.centring.turns_for(held, self._fed + room))
        self._buffers = dict(unsliced(layer.slots.storage.read()))
        self._planes = {name: p.narrow(2, 0, self._slots) for name, p in self._buffers.items()}
        with torch.inference_mode():  # allows in-place changes of planes made in any mode
            for name, plane in self._planes.items():
                plane[:, :, self._held :] = -1 if name == POSITION else 0
        with torch.inference_mode(False):
            self._memory = {name: x.clone() for name, x in self._history.memory.items()}
        used = None
        if self._evicts:
            heads = self._planes[POSITION].shape[1]
            with torch.inference_mode(False):
                self._cursor = self._columns.new_zeros(layer.history.rows, heads, 1)
            self._free(Observation())
        else:
            self._cursor, used = cursors.at(self._held)
        self._past = layer.slots.segments()[:-1]
        self._segment = Segment(self._planes, layer.key_codec, layer.value_codec, used=used)
        self._ticket = Ticket(ref(self))

    def require(self, n: int) -> None:
        """Raise CapacityError if n more tokens do not fit."""
        if self._evicts:
            if self.centre is not None and not self.centre.turns.covers(self._fed + n):
                raise CapacityError(
                    f"{self._fed + n} tokens fed, but these steps take keys up to position "
                    f"{len(self.centre.turns.table)}; close() them, and create new steps"
                )
            return
        require_within(self._layer.slots.storage.limit, self._held + n)
        if self._held + n > self._slots:
            raise CapacityError(
                f"{self._held + n} slots needed, but these steps have room for {self._slots}; "
                "close() them, and create new steps with more tokens"
            )

    def count(self, n: int) -> None:
        """Update the host's counts after n tokens, for example after replaying a graph."""
        self._fed += n
        self._held = min(self._held + n, self._slots - self._evicts)

    @property
    def fed(self) -> Tensor:
        """Columns fed, int64 () on the device."""
        return self._columns

    def next_positions(
        self, n: int, device: torch.device = _CPU, real: Tensor | None = None
    ) -> Tensor:
        """Positions of the next n tokens, int32 (1, n), or (B, n) where rows have padding."""
        after = self._columns + torch.arange(n, device=self._columns.device)
        if self._pads is not None:
            after = after - self._pads[:, None]
        return after.view(-1, n).to(torch.int32)

    def prepare(self) -> None:
        """No step is prepared for the native library."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.run`, for one token per row, with position int32 (1|B, 1)."""
        if torch.compiler.is_compiling():
            return cast(Tensor, step(self._ticket.number, *inputs.in_graph))
        require_causal(inputs)
        if inputs.k.shape[2] != 1:
            raise UnsupportedError(
                f"{inputs.k.shape[2]} tokens in a step on the device, which takes one; feed one "
                "token, or close() the steps first"
            )
        return driven(phases(self, inputs), None)

    def read(self, inputs: StepInputs) -> Tensor:
        """Not called: no layer reads this one."""
        raise NotImplementedError("a layer on the device is read by no other")

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        until: Tensor | None = None,
        q: Tensor | None = None,
    ) -> View:
        assert position is not None
        layer, queries = self._layer, position[0] if self._pads is None else position
        centre = self.centre
        coded = k if centre is None else centre.without(k, queries)
        own = layer.writer.own_planes(k, v, queries, coded)
        write(coded, v, own, self._planes, layer.key_codec, layer.value_codec, self._cursor)
        # One position for all rows: the token is real in every row.
        self._chunk = position.flatten()[:1]
        segments = (*self._past, self._segment)
        return layer.sight.view(segments, queries, None, 0, empty=True)

    def settle(self, observation: Observation) -> None:
        if self._evicts:
            self._free(observation._replace(position=self._chunk))

    def close(self) -> None:
        """Return the slots to the layer, and free empty slots."""
        layer, history = self._layer, self._history
        history.columns, history.memory = self._fed, self._memory
        if not self._evicts:
            layer.cursor.adopt_planes(history, self._buffers, self._held)
            return
        history.floor = self._fed
        count, empty = self._slots - self._held, None
        if count:
            live = (self._planes[POSITION] >= 0).to(torch.uint8)
            empty = live.argsort(dim=2, stable=True)[:, :, :count]
        layer.cursor.adopt_planes(history, self._buffers, self._slots, empty)

    def _free(self, observation: Observation) -> None:
        """Show the observation to the policy, then empty the slot of lowest worth for the next
        token."""
        layer, policy = self._layer, self._layer.policy
        newest = self._columns.to(torch.int64).view(1, 1, 1)
        if observation.position is None:
            newest = newest - 1
        if self._pads is not None:
            newest = newest - self._pads[:, None, None]
        rows = self._planes[POSITION].shape[0]
        state = dict(self._memory)
        seen = layer.settler.seeing(observation)._replace(
            position=observation.position, newest=newest.expand(rows, 1, 1), state=state
        )
        with torch.inference_mode():
            if observation.position is not None and policy.observes:
                policy.observe(self._planes, seen)
                for name, held in self._memory.items():
                    held.copy_(state[name])
            victims = policy.victims(1, self._planes, seen)
            self._cursor.copy_(victims)
            self._planes[POSITION].scatter_(2, self._cursor, -1)


def _slots_of(layer: LayerCache, tokens: int | None) -> int:
    """Number of slots that steps need."""
    storage = layer.slots.storage
    return layer.policy.most_slots or storage.limit or storage.length + (tokens or 0)


def require_fitting(layer: LayerCache, tokens: int | None = None) -> None:
    """Raise `DeviceStep`'s errors, except OutOfMemoryError, before anything changes."""
    policy: Any = layer.policy
    storage = layer.slots.storage
    if not storage.fixed_addresses and (tokens is None or not storage.reserves):
        remedy = ", or the number of tokens to make room for" if storage.reserves else ""
        raise SpecError(
            f"{storage.name} storage can move its slots; a step on the device needs fixed "
            f"storage, such as keep_all@fixed:4096{remedy}"
        )
    if not layer.fed or not layer.slots.storage.length:
        raise StateError("the cache holds no prompt of its own; feed a prompt first")
    if layer.cursor.record_past or "aside" in layer.slots.parts():
        raise StateError(
            "eviction waits for a crop (record_past is set, or a chunk is set aside); crop() or "
            "reset() the cache first"
        )
    blocks = not layer.key_codec.rewritable or layer.slots.late
    if policy.ragged or blocks or Need.ROTARY in policy.needs or layer.cursor.evicted is not None:
        what = f"codec {layer.key_codec.name}" if blocks else f"policy {policy.name}"
        raise UnsupportedError(
            f"{what} needs the host between steps; use another, such as h2o:1024+int8@fixed:2048"
        )
    if policy.share is not None:
        raise UnsupportedError(
            f"a budget of {policy.share} grows while steps run, and a step on the device has a "
            f"fixed number of slots; give policy {policy.name} a number of tokens"
        )
    slots = _slots_of(layer, tokens)
    if storage.limit is not None and slots > storage.limit:
        raise SpecError(
            f"policy {policy.name} needs {slots} slots for a step, but the storage is fixed at "
            f"{storage.limit}; use @fixed:{slots} or more"
        )
