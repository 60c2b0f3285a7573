"""The contract of a policy: which slots stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import SpecError, StateError
from kvkeep.geometry import Geometry
from kvkeep.planes import Planes, PlaneSpec, Reach
from kvkeep.rotary import Rotary


class Need(Enum):
    """What a policy must be shown of a step before it can choose, and what costs extra."""

    MASS = "mass"
    QUERIES = "queries"
    ENCODE_ERROR = "encode_error"
    ROTARY = "rotary"


class Arrivals(NamedTuple):
    """New tokens, as the model gave them: `keys` (B, H, n, Dk), `values` (B, H, n, Dv), `position`
    (n,) or (B, n) with -1 for padding. `error`, fp32 (B, H, n), is what their encoding changed, or
    None if not needed."""

    keys: Tensor
    values: Tensor
    position: Tensor
    error: Tensor | None = None


class Observation(NamedTuple):
    """What a step showed, and what the layer knows.

    Args:
        mass: fp32 (B, H, S) over all slots; None if not needed.
        queries: the chunk's, (B, Hq, n, Dk); None if the step was not the layer's own.
        position: the chunk's positions, (n,), or (B, n) with -1 for padding.
        newest: the newest position of each row, or (B, 1, 1) where rows differ.
        window: the layer's own sliding window.
        scale: the factor on q . k; None if the step was not the layer's own.
        rotary: the model's rotary embedding; None if its keys carry none.
        state: what the policy remembers of each row, (B, ...); its own to change.
        keys, values: decode the slots of some planes, fp32 (B, H, S, D).
    """

    mass: Tensor | None = None
    queries: Tensor | None = None
    position: Tensor | None = None
    newest: int | Tensor = -1
    window: int | None = None
    scale: float | None = None
    rotary: Rotary | None = None
    state: dict[str, Tensor] | None = None
    keys: Callable[[Planes], Tensor] | None = None
    values: Callable[[Planes], Tensor] | None = None

    def fed(self) -> int | Tensor:
        """Real tokens in the chunk: n, or int64 (B, 1, 1) where rows have padding."""
        assert self.position is not None
        if self.position.dim() == 1:
            return self.position.shape[0]
        return (self.position >= 0).sum(dim=1)[:, None, None]


@cache  # for good: CUDA graphs hold its address
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)


@dataclass(frozen=True)
class Policy(ABC):
    """Chooses victims among a layer's slots. Fields are the options of its spec."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    rollback: ClassVar[bool] = False
    """Whether dropping the newest tokens restores the state before them exactly."""

    per_head: ClassVar[bool] = False
    """Whether heads may keep different tokens; positions are then held per head."""

    ragged: ClassVar[bool] = False
    """Whether heads may keep different numbers of tokens. `victims` is then asked to drop `count`
    slots of all heads together, and returns a bool (B, H, S); the budget is the average."""

    counts_empty: ClassVar[bool] = False
    """Whether its choices count empty slots, so that none may be freed beside them."""

    wraps: ClassVar[bool] = False
    """Whether its first field is another policy: `name:options(other)` in a spec."""

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """Scores kept per slot by the storage."""
        return {}

    @property
    def budget(self) -> int | None:
        """Most slots kept between steps; None: all of them."""
        return None

    @property
    def protected(self) -> int:
        """Most slots that are kept whatever they are worth."""
        return 0

    @property
    def room(self) -> int:
        """Slots beside the budget that a single step takes before the policy can choose."""
        return 0

    @property
    def reach(self) -> Reach | None:
        """What a query may see of the slots, if the policy limits it; the layer then drops what
        no later query can reach."""
        return None

    @property
    def shows_padding(self) -> bool:
        """Whether queries of padding see what precedes them; not where they would count."""
        return Need.MASS not in self.needs

    @property
    def observed(self) -> int | None:
        """How many of a chunk's newest queries the mass is of; None: all."""
        return None

    @property
    def observes(self) -> bool:
        """Whether `observe` does anything."""
        return type(self).observe is not Policy.observe

    def within(self, window: int) -> Policy:
        """This policy on a layer whose queries see only the last `window` tokens."""
        return self

    def in_layer(self, index: int, count: int) -> Policy:
        """This policy in layer `index` of `count`."""
        return self

    def with_budget(self, tokens: int) -> Policy:
        """This policy with another budget; SpecError when it cannot have it."""
        raise SpecError(f"policy {self.name} has no budget to change")

    def enter(self, tokens: Arrivals) -> Planes:
        """Its planes for new tokens, (B, H|1, n, ...). Zeros, unless a policy knows better."""
        rows, heads, n, _ = tokens.keys.shape
        device = tokens.keys.device
        return {
            name: _zero(spec.dtype, device).expand(
                rows, 1 if spec.shared else heads, n, *spec.shape
            )
            for name, spec in self.planes.items()
        }

    def require_shown(self, step: Observation) -> None:
        """Raise StateError when a step does not show what this policy needs."""
        for need in self.needs & {Need.MASS, Need.QUERIES}:
            if getattr(step, need.value) is None:
                raise StateError(
                    f"policy {self.name} needs the {need.value} of the step; give "
                    f"settle(Observation({need.value}=...)), or use step()"
                )

    def observe(self, planes: Planes, seen: Observation) -> None:  # noqa: B027 - most do not
        """Learn from a step: change the policy's own planes in place, and `seen.state`."""

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        """Why this policy can have left no such `seen.state`, which a file says it did; empty if it
        can.

        Args:
            geometry: of the layer.
        """
        return f"policy {self.name} remembers no {sorted(memory)}" if memory else ""

    @abstractmethod
    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        """The `count` least valuable slots, int64 (B, 1, count), empty slots first;
        (B, H, count) when `per_head`."""
