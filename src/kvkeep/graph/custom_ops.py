"""Steps inside a compiled graph: each step is one opaque operation, so torch traces nothing of a
cache.

A graph refers to a layer by its ticket, a small tensor with a number that is looked up when the
graph runs. So one graph serves all caches of a model, of any length, and contains no constants of a
cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from struct import Struct
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvkeep.checks import wants_gradients
from kvkeep.errors import StateError
from kvkeep.layer.decode.ready import NOT_MADE, PreparedStep
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import address_of

ON_HOST = (torch.Tag.cudagraph_unsafe,)  # CUDA graphs do not replay work on the host
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor position, float scale, float? softcap, Tensor? sinks, "
    "Tensor? until=None, Tensor? bias=None"
)
"""The fields of `StepInputs` as an operator schema, for operators with separate arguments."""
_GONE = (
    "this graph was given a cache that no longer exists or belongs to another process; give it "
    "a cache of this process"
)


class SteppedLayer(Protocol):
    """A layer that can have a ticket: a `LayerCache`, or one layer of several sequences."""

    @property
    def fed(self) -> int | Tensor:
        """Columns fed."""

    @property
    def padded(self) -> bool:
        """Whether any row had padding."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `LayerCache.next_positions`."""

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""


class Traced(Protocol):
    """The methods of a layer that traced code may call. While tracing, tensors are symbolic."""

    @property
    def on_device(self) -> bool:
        """Whether the state is on the device, so that eager code also calls these methods."""

    @property
    def readers(self) -> int:
        """How many layers read the layer after each step."""

    @property
    def fed(self) -> Tensor:
        """Columns fed to the layer, int64 ()."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the next n tokens: int32 (1, n), or (B, n) with -1 where `real`, bool (B,
        n), is False (padding)."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.run`, with positions as `next_positions` returns them."""

    def read(self, inputs: StepInputs) -> Tensor:
        """Like `LayerCache.read`."""


class Readings:
    """The readings of a layer after its step, each as a step.

    Args:
        layer: the layer that has the slots.
    """

    padded = True  # its positions are those of the step

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def fed(self) -> int:
        """Columns fed."""
        return int(self._layer.fed)

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `LayerCache.next_positions`."""
        return cast(Tensor, self._layer.next_positions(n, device, real))

    def prepare(self) -> None:
        """No reading is prepared: Python makes it."""

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.read`."""
        return cast(Tensor, self._layer.read(inputs))


_tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()
_numbers = count(1)
_TICKET = Struct("=8q")  # KvTicket of native/abi.h


class Ticket:
    """Refers to a layer in this process by a number, as long as the layer exists. A prepared step
    is stored in the ticket's memory, and a program runs it without Python.

    Args:
        find: returns the layer, such as a weak reference to it; None: the layer no longer exists.
        readers: how many layers read this one after each step.

    Attributes:
        number: the ticket as a tensor; copies of the tensor refer to no prepared step.
        readings: the tickets of the layer's readings: one if it has readers.
    """

    on_device = False

    def __init__(self, find: Callable[[], SteppedLayer | None], readers: int = 0) -> None:
        self._find, self._number, self.readers = find, next(_numbers), readers
        self.readings = [Ticket(partial(_readings, find))] if readers else []
        _tickets[self._number] = self
        self._memory = bytearray(_TICKET.size)
        with torch.inference_mode(False):
            self.number = torch.frombuffer(self._memory, dtype=torch.int64)
        self._address = self.number.data_ptr()
        self._kept: PreparedStep | None = None  # keeps the memory that the ticket points to alive
        self.clear(0)

    def prepare(self, fed: int, step: PreparedStep | None) -> None:
        """Set the number of columns fed and the step to run; None: Python runs the step."""
        if step is None:
            self.clear(fed)
            return
        self._kept = step
        records = address_of(step.sequences), step.count, step.rows, address_of(step.kind)
        _TICKET.pack_into(self._memory, 0, self._address, self._number, fed, *records, NOT_MADE)

    def clear(self, fed: int) -> None:
        """Set the number of columns fed; no step is prepared."""
        _TICKET.pack_into(self._memory, 0, self._address, self._number, fed, *[0] * 4, NOT_MADE)
        self._kept = None

    @property
    def result(self) -> int:
        """The prepared step's result: a KvStepResult, or `NOT_MADE`."""
        return int.from_bytes(self._memory[-8:], sys.byteorder, signed=True)

    @property
    def layer(self) -> SteppedLayer:
        """The layer.

        Raises:
            StateError: the layer no longer exists.
        """
        layer = self._find()
        if layer is None:
            raise StateError(_GONE)
        return layer

    @property
    def fed(self) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, fed(self.number))

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, next_positions(self.number, n, real, device))

    def run(self, inputs: StepInputs) -> Tensor:
        """See `Traced`."""
        return cast(Tensor, step(self.number, *inputs.in_graph))

    def read(self, inputs: StepInputs) -> Tensor:
        """See `Traced`."""
        return self.readings[0].run(inputs)


def _readings(find: Callable[[], SteppedLayer | None]) -> Readings | None:
    layer = find()
    return None if layer is None else Readings(layer)


def with_readings(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets of layers, and behind them those of their readings."""
    return [*tickets, *(one for ticket in tickets for one in ticket.readings)]


def ticket_of(number: int) -> Ticket:
    """The ticket with a number.

    Raises:
        StateError: the ticket no longer exists, or belongs to another process.
    """
    ticket = _tickets.get(number)
    if ticket is None:
        raise StateError(_GONE)
    return ticket


def led_to(ticket: Tensor) -> SteppedLayer:
    """The layer that a ticket's number refers to; see `ticket_of` for errors."""
    return ticket_of(int(ticket[1])).layer


_library: Any = torch.library.Library("kvkeep", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(
    schema: str,
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define operator `kvkeep::...`, without gradients. `run` computes it; `fake` returns a tensor
    of the result's shape. Wrappers of `torch.library.custom_op` would take longer than a step."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvkeep::{name}", fake, lib=_library)
    return getattr(torch.ops.kvkeep, name).default


def _fed(ticket: Tensor) -> Tensor:
    return torch.as_tensor(led_to(ticket).fed).clone()


def _next_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    layer = led_to(ticket)
    if real is None:
        return layer.next_positions(n, device).view(-1, n).clone()
    position = layer.next_positions(n, device, None if bool(real.all()) else real)
    return position.expand(real.shape).clone()


def _step(ticket: Tensor, *inputs: Any) -> Tensor:
    given = StepInputs(*inputs)
    if wants_gradients(*given[:3]):
        raise StateError("a step in a graph has no gradients; use torch.no_grad(), or kvkeep.train")
    return run(led_to(ticket), given).contiguous()


def _fake_fed(ticket: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _fake_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty((1, n) if real is None else real.shape, dtype=torch.int32, device=device)


def _fake_step(ticket: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


# Every schema declares that it changes the ticket, so torch neither reorders nor merges calls.
fed = define_operator("fed(Tensor(a!) ticket) -> Tensor", _fed, _fake_fed, ON_HOST)
next_positions = define_operator(
    "next_positions(Tensor(a!) ticket, SymInt n, Tensor? real, Device device) -> Tensor",
    _next_positions,
    _fake_positions,
    ON_HOST,
)
step = define_operator(f"step(Tensor(a!) ticket, {INPUTS}) -> Tensor", _step, _fake_step, ON_HOST)
"""Operators for `Ticket.fed`, `next_positions` and `run`."""


def run(layer: SteppedLayer, inputs: StepInputs) -> Tensor:
    """Run a layer's step with positions (1, n) or (B, n)."""
    position = inputs.position
    assert position is not None
    if not layer.padded and int(position if position.numel() == 1 else position.min()) >= 0:
        inputs = inputs._replace(position=position[0])  # the same positions for all rows
    return layer.run(inputs)
