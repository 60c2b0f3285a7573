"""Keep the keys that differ most from the mean key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvkeep.planes import POSITION, Planes, PlaneSpec
from kvkeep.policy.base import Observation
from kvkeep.policy.rule import Rule
from kvkeep.policy.scored import Scored


@final
@dataclass(frozen=True)
class KeyDiff(Scored):
    """Score: minus the cosine between a key and the mean direction of the head's keys. Every
    eviction reads all keys. Source: KeyDiff (arXiv 2504.15364).
    """

    name: ClassVar[str] = "keydiff"
    newest: ClassVar[int] = 64
    rollback: ClassVar[bool] = True

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        return {}

    @property
    def rule(self) -> Rule | None:
        return Rule(by_keys=True)

    def score(self, planes: Planes, seen: Observation) -> Tensor:
        assert seen.keys is not None
        keys, live = seen.keys(planes), planes[POSITION][..., None] >= 0
        unit = torch.where(live, normalize(keys, dim=-1), 0).nan_to_num()  # a key may be NaN
        # In float64, so that the sum does not depend on the order of the slots.
        total = unit.sum(dim=2, keepdim=True, dtype=torch.float64)
        anchor = total / live.sum(dim=2, keepdim=True).clamp(min=1)
        return -cosine_similarity(keys, anchor.float(), dim=-1)
