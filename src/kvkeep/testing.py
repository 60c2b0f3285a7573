"""For those who add a policy, codec, storage or backend: an oracle, and every legal combination.

for spec in conformance_specs():
    check_layer(spec)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.codec import CODECS
from kvkeep.layer import LayerCache
from kvkeep.planes import POSITION, Reach
from kvkeep.policy import POLICIES
from kvkeep.spec import CacheSpec
from kvkeep.storage import STORAGES

EXAMPLES = {
    "keep_all": "keep_all",
    "window": "window:6,sinks=2",
    "h2o": "h2o:8,recent=3,sinks=1",
    "vlen": "vlen:8",
    "qh2o": "qh2o:8,recent=2",
    "tova": "tova:8",
    "snapkv": "snapkv:8,window=4,pool=3",
    "knorm": "knorm:8,recent=1",
    "keydiff": "keydiff:8",
    "expected_attention": "expected_attention:8,sinks=2,future=16",
    "random": "random:8",
    "adakv": "adakv:0.3(h2o:8,recent=2)",
    "pyramid": "pyramid:2(h2o:8,recent=2)",
}
"""A small spec of each policy; a new policy needs one here."""


def conformance_specs() -> Iterator[CacheSpec]:
    """Every legal policy x codec x storage, with small options."""
    for policy in POLICIES:
        for codec in CODECS:
            for storage in STORAGES:
                spec = CacheSpec.parse(f"{EXAMPLES[policy]}+{codec}@{storage}")
                if storage == "fixed" and spec.policy.budget is None:
                    spec = CacheSpec.parse(f"{EXAMPLES[policy]}+{codec}@{storage}:256")
                yield spec


@dataclass(frozen=True)
class _Token:
    position: int
    k: Tensor  # (H, Dk)
    v: Tensor  # (H, Dv)


@dataclass
class OracleLayer:
    """A layer that keeps every token ever fed, and looks at one query at a time, in float64.

    It knows what a window may see, and nothing of slots, segments or eviction.
    """

    reach: Reach | None = None
    window: int | None = None
    rows: list[list[_Token | None]] = field(default_factory=list)  # None: padding

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, *, scale: float) -> Tensor:
        """As `LayerCache.step`, with positions (B, n)."""
        if not self.rows:
            self.rows = [[] for _ in range(k.shape[0])]
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
        for b, row in enumerate(self.rows):
            for i in range(k.shape[2]):
                place = int(position[b, i])
                row.append(_Token(place, k[b, :, i], v[b, :, i]) if place >= 0 else None)
                out[b, :, i] = self._attend(q[b, :, i].double(), row, scale)
        return out

    def _attend(self, q: Tensor, row: list[_Token | None], scale: float) -> Tensor:
        tokens = [token for token in row if token is not None]
        if not tokens:
            return torch.zeros(1, dtype=torch.float64)
        now = tokens[-1].position
        seen = [token for token in tokens if self._sees(now, token.position)]
        keys = torch.stack([token.k for token in seen], dim=1).double()  # (H, S, Dk)
        values = torch.stack([token.v for token in seen], dim=1).double()
        group = q.shape[0] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        scores = (keys @ q[:, :, None])[:, :, 0] * scale
        return (torch.softmax(scores, dim=1)[:, None] @ values)[:, 0]

    def _sees(self, now: int, position: int) -> bool:
        if self.window is not None and now - position >= self.window:
            return False
        reach = self.reach
        return reach is None or now - position < reach.size or position < reach.sinks

    def crop(self, tokens: int) -> None:
        """As `LayerCache.crop`."""
        if tokens:
            self.rows = [row[:tokens] for row in self.rows]

    def take_rows(self, index: list[int]) -> None:
        """As `LayerCache.take_rows`."""
        self.rows = [list(self.rows[i]) for i in index]

    def reset(self) -> None:
        """As `LayerCache.reset`."""
        self.rows = []

    @property
    def seen(self) -> list[int]:
        """Tokens per row, padding not counted."""
        return [sum(token is not None for token in row) for row in self.rows]

    def next_positions(self, real: Tensor) -> Tensor:
        """Positions (B, n) that continue the rows; -1 where `real` (B, n) is False."""
        seen = torch.tensor(self.seen or [0] * real.shape[0])[:, None]
        return (seen + real.cumsum(dim=1) - 1).masked_fill(~real, -1)


def check_layer(layer: LayerCache, oracle: OracleLayer, *, atol: float = 0.0) -> None:
    """Store and retrieve: what lives in `layer` is what `oracle` was fed.

    Every live slot decodes to its own position's key and value within `atol`, no position lives
    twice, what the policy must keep is there, and the bytes are slots times bytes per slot.

    Raises:
        AssertionError: it is not.
    """
    view = layer._view(torch.zeros(1, dtype=torch.int32))
    budget = layer.policy.budget
    assert layer.length <= layer.capacity or layer.record_past
    assert budget is None or layer.length <= budget or layer.record_past
    assert layer.live_bytes == layer.length * layer.storage.slot_bytes
    assert layer.seen.tolist() == oracle.seen
    (segment,) = view.segments
    keys, values = segment.keys(torch.float64), segment.values(torch.float64)
    for b, row in enumerate(oracle.rows):
        fed = {token.position: token for token in row if token is not None}
        now = len(fed) - 1
        for h in range(keys.shape[1]):
            place = segment.position[b, h % segment.position.shape[1]]
            live = {int(p): slot for slot, p in enumerate(place) if p >= 0}
            assert len(live) == int((place >= 0).sum()), "a position lives twice"
            for position, slot in live.items():
                token = fed[position]
                torch.testing.assert_close(keys[b, h, slot], token.k[h].double(), atol=atol, rtol=0)
                torch.testing.assert_close(
                    values[b, h, slot], token.v[h].double(), atol=atol, rtol=0
                )
            if budget is None or layer.policy.reach is not None:
                needed = {p for p in fed if oracle._sees(now + 1, p)}
                assert needed <= set(live), "a token that the next query sees was dropped"


def example_planes(layer: LayerCache) -> dict[str, Tensor]:
    """A copy of everything a layer holds, to see that a failed call changed nothing."""
    return {name: plane.clone() for name, plane in layer.storage.read().items()}


__all__ = [
    "EXAMPLES",
    "POSITION",
    "OracleLayer",
    "check_layer",
    "conformance_specs",
    "example_planes",
]
