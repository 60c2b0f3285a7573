"""Steps inside a compiled graph: each step is one opaque operation, so torch traces nothing of a
cache.

A graph refers to a layer by its ticket, a small tensor with a number that is looked up when the
graph runs. So one graph serves all caches of a model, of any length, and contains no constants of a
cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from struct import Struct
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvkeep.checks import wants_gradients
from kvkeep.errors import StateError
from kvkeep.layer.decode.ready import NOT_MADE, Ready
from kvkeep.layer.packed import ReadyTogether
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import address_of

ON_HOST = (torch.Tag.cudagraph_unsafe,)  # CUDA graphs do not replay work on the host
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor position, float scale, float? softcap, Tensor? sinks, "
    "Tensor? until=None, Tensor? bias=None"
)
"""The fields of `StepInputs` as an operator schema, for operators with separate arguments."""
PreparedStep = Ready | ReadyTogether
"""A step of a layer, or of one layer of several sequences."""
_GONE = (
    "this graph was given a cache that no longer exists or belongs to another process; give it "
    "a cache of this process"
)


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


class TicketLayer(Protocol):
    """A layer that can have a ticket: a `LayerCache`, or one layer of several sequences."""

    @property
    def fed(self) -> int | Tensor:
        """Columns fed, padding included."""

    @property
    def padded(self) -> bool:
        """Whether any row has had padding."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """See `LayerCache.next_positions`."""

    def prepare(self) -> PreparedStep | None:
        """Prepare the next decode step; None: only `run` can make it."""

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""

    def read(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.read`."""


_tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()
_numbers = count(1)
_TICKET = Struct("=8q")  # KvTicket of native/abi.h


class Ticket:
    """Refers to a layer in this process by a number, as long as the layer exists. A prepared step
    is stored in the ticket's memory, and a program runs it without Python.

    Args:
        find: returns the layer, such as a weak reference to it; None: the layer no longer exists.
        readers: how many layers read this one after each step.
        reads: the ticket's step is a reading of the layer.

    Attributes:
        number: the ticket as a tensor; copies of the tensor refer to no prepared step.
        readings: the tickets of the layer's readings: one if it has readers.
    """

    on_device = False

    def __init__(
        self, find: Callable[[], TicketLayer | None], readers: int = 0, reads: bool = False
    ) -> None:
        self._find, self._number, self.readers, self._reads = find, next(_numbers), readers, reads
        self.readings = [Ticket(find, reads=True)] if readers else []
        _tickets[self._number] = self
        self._memory = bytearray(_TICKET.size)
        with torch.inference_mode(False):
            self.number = torch.frombuffer(self._memory, dtype=torch.int64)
        self._address = self.number.data_ptr()
        self._kept: PreparedStep | None = None  # keeps the memory that the ticket points to alive
        self.clear(0)

    def prepare(self) -> PreparedStep | None:
        """Set the number of columns fed and the step to run, if the layer can prepare it; otherwise
        Python runs it. Return the prepared step."""
        fed = int(self.layer.fed)
        step: PreparedStep | None = None if self._reads else self.layer.prepare()
        if step is None:
            self.clear(fed)
            return None
        self._kept = step
        records = address_of(step.sequences), step.count, step.rows, address_of(step.kind)
        _TICKET.pack_into(self._memory, 0, self._address, self._number, fed, *records, NOT_MADE)
        return step

    def make(self, inputs: StepInputs) -> Tensor:
        """Run the layer's step, or its reading."""
        layer = self.layer
        return layer.read(inputs) if self._reads else run(layer, inputs)

    def clear(self, fed: int) -> None:
        """Set the number of columns fed; no step is prepared."""
        _TICKET.pack_into(self._memory, 0, self._address, self._number, fed, *[0] * 4, NOT_MADE)
        self._kept = None

    @property
    def result(self) -> int:
        """The prepared step's result: a KvStepResult, or `NOT_MADE`."""
        return int.from_bytes(self._memory[-8:], sys.byteorder, signed=True)

    @property
    def layer(self) -> TicketLayer:
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


def with_readings(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets of layers, and behind them those of their readings."""
    return [*tickets, *(one for ticket in tickets for one in ticket.readings)]


def ticket_of(number: int | Tensor) -> Ticket:
    """The ticket with a number, or with the number in a ticket's tensor.

    Raises:
        StateError: the ticket no longer exists, or belongs to another process.
    """
    ticket = _tickets.get(number if isinstance(number, int) else int(number[1]))
    if ticket is None:
        raise StateError(_GONE)
    return ticket


_library: Any = torch.library.Library("kvkeep", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, fake: Callable[..., Tensor], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Callable[..., Tensor]], Any]:
    """A decorator that makes a function the operator `kvkeep::...`, without gradients. `fake`
    returns a tensor of the result's shape. Wrappers of `torch.library.custom_op` would take longer
    than a step."""

    def define(run: Callable[..., Tensor]) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema, tags=tags)
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kvkeep::{name}", fake, lib=_library)
        return getattr(torch.ops.kvkeep, name).default

    return define


# Every schema declares that it changes the ticket, so torch neither reorders nor merges calls.
@operator("fed(Tensor(a!) ticket) -> Tensor", lambda _: torch.empty((), dtype=torch.int64), ON_HOST)
def fed(ticket: Tensor) -> Tensor:
    """The operator for `Ticket.fed`."""
    return torch.as_tensor(ticket_of(ticket).layer.fed).clone()


def _fake_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty((1, n) if real is None else real.shape, dtype=torch.int32, device=device)


@operator(
    "next_positions(Tensor(a!) ticket, SymInt n, Tensor? real, Device device) -> Tensor",
    _fake_positions,
    ON_HOST,
)
def next_positions(ticket: Tensor, n: int, real: Tensor | None, device: torch.device) -> Tensor:
    """The operator for `Ticket.next_positions`."""
    layer = ticket_of(ticket).layer
    position = layer.next_positions(n, device, None if real is None or real.all() else real)
    return (position.view(-1, n) if real is None else position.expand(real.shape)).clone()


def like_step(q: Tensor, v: Tensor) -> Tensor:
    """A tensor of the shape of a step's result."""
    return q.new_empty((*q.shape[:3], v.shape[3]))


@operator(
    f"step(Tensor(a!) ticket, {INPUTS}) -> Tensor",
    lambda ticket, q, k, v, *_: like_step(q, v),
    ON_HOST,
)
def step(ticket: Tensor, *inputs: Any) -> Tensor:
    """The operator for `Ticket.run`."""
    given = StepInputs(*inputs)
    if wants_gradients(*given[:3]):
        raise StateError("a step in a graph has no gradients; use torch.no_grad(), or kvkeep.train")
    return ticket_of(ticket).make(given).contiguous()


def run(layer: TicketLayer, inputs: StepInputs) -> Tensor:
    """Run a layer's step with positions (1, n) or (B, n)."""
    position = inputs.position
    assert position is not None
    if not layer.padded and int(position if position.numel() == 1 else position.min()) >= 0:
        inputs = inputs._replace(position=position[0])  # the same positions for all rows
    return layer.run(inputs)
