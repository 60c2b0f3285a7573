"""The step of a layer, in the one place where its parts are put in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from kvkeep.attention import Attend, Options, Segment, View, dispatch
from kvkeep.planes import limits
from kvkeep.policy import Need, Observation, Policy


class StepInputs(NamedTuple):
    """What a model gives to one step of a layer's attention.

    Args:
        q, k, v: (B, Hq, n, Dk), (B, H, n, Dk) and (B, H, n, Dv); keys after the rotary embedding.
        position: see `LayerCache.extend`.
        scale, softcap, sinks: see `Options`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class Step(ABC):
    """Write new slots, attend to what is held, evict: what every step of every layer does.

    Where the next token goes and what is held are numbers on the host in a `LayerCache`, and
    tensors on the device in a `DeviceStep`; both give the order to `_step`.
    """

    policy: Policy

    @abstractmethod
    def _extend(self, k: Tensor, v: Tensor, position: Tensor | None) -> View:
        """Write n new tokens; what their queries attend to."""

    @abstractmethod
    def _settle(self, observation: Observation) -> None:
        """Let the policy look at what was attended to, and evict."""

    def _step(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Extend, attend and settle: the output (B, Hq, n, Dv)."""
        view = self._extend(inputs.k, inputs.v, inputs.position)
        policy = self.policy
        options = Options(
            inputs.scale,
            inputs.softcap,
            inputs.sinks,
            Need.MASS in policy.needs,
            policy.observed,
        )
        out, mass = (attend or dispatch)(inputs.q, view, options)
        q = inputs.q.detach() if inputs.q.requires_grad else inputs.q
        self._settle(Observation(mass, queries=q, scale=inputs.scale))
        return out


def view_of(
    segments: tuple[Segment, ...],
    queries: Tensor,
    policy: Policy,
    window: int | None,
    length: int | None,
    fed: int,
    empty: bool,
) -> View:
    """What queries attend to.

    Args:
        segments: everything held, the queries' own tokens last.
        queries: where they stand, (n,) or (B, n).
        window: the layer's own sliding window in tokens, if it has one.
        length: slots in use, the longest rows' and heads'; None: the device knows, so that every
            limit of what a query sees is checked.
        fed: columns fed, the chunk's own included.
        empty: whether some slots are empty.
    """
    reaches = limits(policy.reach, window, queries.shape[-1], length, fed)
    return View(segments, queries, empty, reaches)
