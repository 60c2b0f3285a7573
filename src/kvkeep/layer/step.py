"""The single implementation of a layer's step (extend, attend, settle)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kvkeep.attention import Attend, Centre, Options, View, dispatch
from kvkeep.checks import resolved
from kvkeep.errors import UnsupportedError
from kvkeep.policy import Need, Observation, Policy

Slopes = tuple[float, ...]
"""The slopes of a layer's query heads; see `Options`."""


@lru_cache(maxsize=256)
def slopes_on(slopes: Slopes | None, device: torch.device) -> Tensor | None:
    """Slopes as a tensor, float32 (Hq,), the same one at each call."""
    with torch.inference_mode(False):
        return None if slopes is None else torch.tensor(slopes, device=device, dtype=torch.float32)


class StepInputs(NamedTuple):
    """The inputs of one step of a layer's attention.

    Args:
        q, k, v: (B, Hq, n, Dk), (B, H, n, Dk) and (B, H, n, Dv); keys after the rotary embedding.
        position, until: see `LayerCache.extend`.
        scale, softcap, sinks: see `Options`.
        bias: see `Options`.
        chosen: see `View`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    until: Tensor | None = None
    bias: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def in_graph(self) -> tuple[Any, ...]:
        """The inputs that operators in graphs take: all except `chosen`, which graphs do not
        support."""
        return self[:-1]

    @property
    def special(self) -> bool:
        """Whether they have a part that the native step does not support."""
        return not (self.sinks is None and self.until is None and self.bias is None)

    def resolved(self) -> StepInputs:
        """The inputs with all values in memory; see `checks.resolved`."""
        q, k, v = self.q, self.k, self.v
        if q.is_neg() or k.is_neg() or v.is_neg():
            return self._replace(q=resolved(q), k=resolved(k), v=resolved(v))
        return self

    def options(self, slopes: Slopes | None, centre: Centre | None = None, **mass: Any) -> Options:
        """The options of attention in a layer with these slopes and this centre. `mass`: options
        about recorded weights, such as `need_mass`."""
        own = Options(self.scale, self.softcap, self.sinks, centre=centre, bias=self.bias)
        return own._replace(slopes=slopes_on(slopes, self.q.device), **mass)

    def part(self, first: int, count: int) -> StepInputs:
        """The inputs of `count` tokens from token `first` on."""
        at = slice(first, first + count)
        q, k, v = (x[:, :, at] for x in self[:3])
        position, until = (x if x is None else x[..., at] for x in (self.position, self.until))
        chosen, bias = (x if x is None else x[:, :, at] for x in (self.chosen, self.bias))
        part = self._replace(q=q, k=k, v=v, position=position, until=until)
        return part._replace(chosen=chosen, bias=bias)

    def parts(self, most: int) -> Iterator[StepInputs]:
        """The inputs in pieces of at most `most` tokens, in order."""
        for first in range(0, self.q.shape[2], most):
            yield self.part(first, most)


def require_causal(inputs: StepInputs) -> None:
    """Raise UnsupportedError if a query sees later tokens, for callers that do not support it."""
    if inputs.until is not None:
        raise UnsupportedError(
            "some tokens see later tokens, as within an image, but packed forwards, compiled and "
            "graphed steps, training and compressing do not support this; feed the tokens to a "
            "cache of one sequence by an ordinary forward"
        )


class AttendCall(NamedTuple):
    """The arguments of `attend` for one step."""

    q: Tensor
    view: View
    options: Options


Phases = Generator[AttendCall, tuple[Tensor, Tensor | None], Tensor]
"""Steps that pause for the caller to compute their attention, and return the output. A step of one
token a row pauses once."""


def driven(phases: Phases, attend: Attend | None) -> Tensor:
    """Run steps, computing attention by `attend`; None: by `dispatch`. A step that fails is undone
    before its error is raised."""
    attend, call = attend or dispatch, next(phases)
    try:
        while True:
            call = phases.send(attend(*call))
    except StopIteration as done:
        return cast(Tensor, done.value)
    finally:
        phases.close()


def finished(phases: Phases, result: tuple[Tensor, Tensor | None]) -> Tensor:
    """Finish a step that pauses once, given the result of its attention."""
    try:
        phases.send(result)
    except StopIteration as done:
        return cast(Tensor, done.value)
    raise RuntimeError("a step stopped twice")


class Step(Protocol):
    """What the steps of a layer consist of: write new slots, and evict after attention.

    `Writer` keeps the cursor and the slot counts as numbers on the host, `DeviceStep` as tensors on
    the device. `phases` gives both the order of operations.
    """

    policy: Policy
    slopes: Slopes | None

    @property
    def centre(self) -> Centre | None:
        """The centre of the layer's slots; None: no centre."""

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        until: Tensor | None = None,
        q: Tensor | None = None,
    ) -> View:
        """Write n new tokens and return the view that their queries attend to. `q`: their queries,
        on which the scales of a centre are measured; None: unknown."""

    def settle(self, observation: Observation) -> None:
        """Pass the observation to the policy, and evict."""


def phases(layer: Step, inputs: StepInputs) -> Phases:
    """A step that pauses for the caller to compute its attention."""
    view = layer.extend(inputs.k, inputs.v, inputs.position, inputs.until, inputs.q)
    view = view if inputs.chosen is None else view._replace(chosen=inputs.chosen)
    policy = layer.policy
    needs_mass = Need.MASS in policy.needs
    options = inputs.options(
        layer.slopes, layer.centre, need_mass=needs_mass, observed=policy.observed
    )
    out, mass = yield AttendCall(inputs.q, view, options)
    q = inputs.q.detach() if inputs.q.requires_grad else inputs.q
    layer.settle(Observation(mass, queries=q, scale=inputs.scale))
    return out
