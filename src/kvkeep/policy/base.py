"""The contract of a policy: which slots stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from kvkeep.planes import Planes, PlaneSpec, Reach


class Need(Enum):
    """What a policy must be shown of a step before it can choose."""

    MASS = "mass"


@dataclass(frozen=True)
class Observation:
    """What a step showed. `mass` is fp32 (B, H, S) over the view's slots, or None if not needed."""

    mass: Tensor | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Chooses victims among a layer's slots. Fields are the options of its spec."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    rollback: ClassVar[bool] = False
    """Whether dropping the newest tokens restores the state before them exactly."""

    per_head: ClassVar[bool] = False
    """Whether heads may keep different tokens; positions are then held per head."""

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """Scores kept per slot by the storage."""
        return {}

    @property
    def budget(self) -> int | None:
        """Most slots kept between steps; None: all of them."""
        return None

    @property
    def reach(self) -> Reach | None:
        """What a query may see of the slots, if the policy limits it; the layer then drops what
        no later query can reach."""
        return None

    def within(self, window: int) -> Policy:
        """This policy on a layer whose queries see only the last `window` tokens."""
        return self

    @abstractmethod
    def victims(self, count: int, planes: Planes, observation: Observation | None) -> Tensor:
        """The `count` least valuable slots, int64 (B, 1, count), empty slots first;
        (B, H, count) when `per_head`."""
