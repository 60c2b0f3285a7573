"""Keep the tokens that future queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.geometry import Geometry
from kvkeep.planes import POSITION, Planes, norms
from kvkeep.policy.base import Need, Observation
from kvkeep.policy.normal_queries import MeanRotation, Queries, expected_logits
from kvkeep.policy.rule import Enter, Rule
from kvkeep.policy.scored import SCORE, Scored


@final
@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """Score: the attention expected from queries at the next `future` positions, divided among the
    slots after the sinks, times the norm of the value. Unrotated queries are modelled as normally
    distributed, with the mean and covariance of the queries observed after the sinks. Source:
    Expected Attention (arXiv 2510.00636).

    Computing scores reads all keys and values. So they are computed after each chunk, but in steps
    of one token only at every `interval`-th position: often enough that each token has a score
    before it can be evicted. The policy observes the queries of these chunks and steps only.
    """

    sinks: int = 4
    future: int = 512

    name: ClassVar[str] = "expected_attention"
    newest: ClassVar[int] = 64
    needs: ClassVar[frozenset[Need]] = frozenset({Need.QUERIES, Need.ROTARY})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future < 1:
            raise SpecError(
                f"expected_attention with future={self.future}: it must be at least 1; use 512"
            )

    @property
    def interval(self) -> int:
        """Number of single-token steps from one computation of scores to the next."""
        return max(1, self.protected_recent)

    @property
    def rule(self) -> Rule | None:
        return Rule({SCORE: Enter.ZERO}, interval=self.interval, future=self.future)

    def observe(self, planes: Planes, seen: Observation) -> None:
        q, position, state = seen.queries, seen.position, seen.state
        assert q is not None
        assert position is not None
        assert state is not None
        rows, _, n, _ = q.shape
        place = position.reshape(-1, 1, n).expand(rows, 1, n).to(q.device)
        due = place >= 0
        if n == 1:
            due &= (place + 1) % self.interval == 0
        renewed = due.any(dim=2, keepdim=True)
        if not renewed.any():
            return
        q = q.float() if seen.rotary is None else seen.rotary.turn(q.float(), -place)
        counts = due & (place >= self.sinks)
        q = torch.where(counts[..., None], q, 0)
        sums = Queries(
            counts.sum(dim=2)[..., None, None].float(),
            q.sum(dim=2)[:, :, None],
            q.transpose(2, 3) @ q,
        )
        for name, value in sums.state.items():
            state[name] = state[name] + value if name in state else value
        planes[SCORE].copy_(torch.where(renewed, self._expected(planes, seen), planes[SCORE]))

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        rows, heads, width = geometry[:3]
        if not memory:
            return ""
        found = {name: (x.dtype, tuple(x.shape)) for name, x in memory.items()}
        queries = memory["sum"].shape[1] if "sum" in memory and memory["sum"].dim() == 4 else 0
        expected = {
            "count": (torch.float32, (rows, 1, 1, 1)),
            "sum": (torch.float32, (rows, queries, 1, width)),
            "products": (torch.float32, (rows, queries, width, width)),
        }
        if found == expected and queries and queries % heads == 0:
            return ""
        return f"policy {self.name} keeps the state {expected}, not {found}"

    def _expected(self, planes: Planes, seen: Observation) -> Tensor:
        """The score of each slot, fp32 (B, H, S)."""
        state, place = seen.state, planes[POSITION]
        assert state is not None
        assert seen.keys is not None
        assert seen.values is not None
        keys, rotary = seen.keys(planes), seen.rotary
        rotation = (
            None
            if rotary is None
            else MeanRotation.after(rotary, seen.newest, self.future, keys.device)
        )
        scale = keys.shape[3] ** -0.5 if seen.scale is None else seen.scale
        logits = expected_logits(keys, Queries.of(state), rotation, scale)
        # Without the sinks: their share differs from query head to query head, so with them the
        # mean over a group would give each head another weight.
        ranked = place >= self.sinks
        logits = logits.masked_fill(~ranked[:, :, None], -torch.inf)
        expected = torch.softmax(logits, dim=-1).mean(dim=2)
        return torch.where(ranked, expected * norms(seen.values(planes)), 0)
