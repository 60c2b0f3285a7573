"""What each policy keeps, written from its formula: every token ever fed, in float64, row by row.

It shares no code with the policies: of a spec it reads the options only, of a codec what it makes
of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.codec import Codec
from kvkeep.spec import CacheSpec

SPECS: list[tuple[str, int | None]] = [
    ("window:8", None),
    ("window:6,sinks=2", None),
    ("h2o:8", None),
    ("h2o:8,recent=0", None),
    ("h2o:9,recent=3,sinks=1,keep_from=3,keep_to=5", None),
    ("h2o:8,recent=2,normalize=1", None),
    ("h2o:8,recent=1,sinks=1+int8", 12),
    ("vlen:8", None),
    ("vlen:8,recent=1,sinks=2,normalize=1", None),
    ("qh2o:8,recent=2+int8", None),
    ("qh2o:8,recent=1,mix=0.2+int4:centre=0/int8", None),
    ("qvlen:8,recent=2,mix=0.7+int4:centre=0,recent=0,sinks=0", None),
    ("qvlen:8,normalize=1,sinks=1", None),
    ("tova:8", None),
    ("tova:8,recent=2,sinks=1,keep_from=4,keep_to=6", None),
    ("tova:8", 12),
    ("snapkv:8,window=4,pool=3", None),
    ("snapkv:12,window=3,pool=5,sinks=1", None),
    ("snapkv:8,window=4,recent=6,pool=1", 16),
    ("knorm:8,recent=1", None),
    ("knorm:8,keep_from=2,keep_to=4,sinks=1", 10),
    ("keydiff:8", None),
    ("keydiff:8,recent=2+fp8", None),
    ("random:8", None),
    ("random:8,seed=5,sinks=2,recent=1", None),
    ("adakv(h2o:8,recent=2)", None),
    ("adakv:0.5(snapkv:8,window=2,pool=3)", None),
    ("adakv:0(knorm:8,sinks=1)", 14),
]
"""Specs whose decisions this oracle knows, each with a layer's window or None."""


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    """What a codec makes of x (B, H, n, D), in float64."""
    return codec.decode(codec.encode(x), torch.float64)


@dataclass
class Row:
    """One row's tokens, axis 1; `live` lists each head's kept positions."""

    k: Tensor  # (H, T, Dk), as stored
    v: Tensor
    given_k: Tensor  # as the model gave them
    given_v: Tensor
    score: Tensor  # (H, T)
    live: list[list[int]] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return self.k.shape[1]


class EvictionOracle:
    """The live positions of every row and head after every step.

    `gap` is the smallest difference so far between a score that stayed and one that went. Where it
    is far above float32's rounding, a decision does not hang on it.
    """

    def __init__(
        self,
        spec: str,
        *,
        scale: float,
        window: int | None = None,
        slopes: tuple[float, ...] | None = None,
    ) -> None:
        parsed = CacheSpec.parse(spec)
        self.codecs = parsed.key_codec, parsed.value_codec
        self.options: Any = parsed.policy
        self.adaptive = self.options.name == "adakv"
        self.floor = self.options.floor if self.adaptive else 0.0
        if self.options.wraps:
            self.options = self.options.inner
        self.name = self.options.name
        self.shared = self.name in ("tova", "window")
        self.scale, self.window, self.slopes = scale, window, slopes
        self.rows: list[Row] = []
        self.gap = math.inf

    @property
    def budget(self) -> int:
        if self.name == "window":
            return self.options.size + self.options.sinks
        return self.options.tokens

    @property
    def recent(self) -> int:
        """How many of the newest tokens are protected."""
        if self.name == "window":
            return self.options.size
        if self.name in ("h2o", "vlen", "qh2o", "qvlen") and self.options.recent is None:
            return self.options.tokens // 2
        if self.name in ("knorm", "keydiff") and self.options.recent is None:
            options = self.options
            named = sum(
                p < options.sinks or options.keep_from <= p < options.keep_to
                for p in range(max(options.sinks, options.keep_to))
            )
            return min(64, (options.tokens - named) // 2)
        return max(self.options.recent or 0, self.options.window if self.name == "snapkv" else 0)

    def step(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> list[list[list[int]]]:
        """Feed q (B, Hq, n, Dk), k, v and `real` (B, n); the live positions by row and head."""
        stored = [round_trip(codec, x) for codec, x in zip(self.codecs, (k, v), strict=True)]
        rows, heads, _, dim = k.shape
        if not self.rows:
            keys, values = torch.zeros(2, heads, 0, dim).double(), v[0, :, :0].double()
            empty = torch.zeros(heads, 0).double()
            live = [[[] for _ in range(heads)] for _ in range(rows)]
            self.rows = [Row(*keys, *[values] * 2, empty, own) for own in live]
            for row in self.rows:
                row.k, row.v, row.given_k, row.given_v = keys[0], values, keys[0], values
        for b, row in enumerate(self.rows):
            new = real[b].nonzero().flatten().tolist()
            if new:
                self._feed(row, q[b, :, new], stored[0][b, :, new], stored[1][b, :, new])
                row.given_k = torch.cat([row.given_k, k[b, :, new].double()], dim=1)
                row.given_v = torch.cat([row.given_v, v[b, :, new].double()], dim=1)
                self._learn(row, self._probability(row, q[b, :, new], len(new)))
            self._evict(row)
        return [[sorted(live) for live in row.live] for row in self.rows]

    def _feed(self, row: Row, q: Tensor, k: Tensor, v: Tensor) -> None:
        first, n = row.seen, k.shape[1]
        row.k, row.v = torch.cat([row.k, k], dim=1), torch.cat([row.v, v], dim=1)
        row.score = torch.cat([row.score, torch.zeros(k.shape[0], n).double()], dim=1)
        for live in row.live:
            live.extend(range(first, first + n))

    def _probability(self, row: Row, q: Tensor, n: int) -> Tensor:
        """The attention matrix (H, G, n, T) of the newest n tokens' queries q (Hq, n, Dk)."""
        heads, seen = len(row.live), row.seen
        grouped = q.double().reshape(heads, -1, n, q.shape[-1])
        logits = torch.einsum("hgnd,htd->hgnt", grouped, row.k) * self.scale
        if self.slopes is not None:
            distance = torch.arange(seen) - torch.arange(seen - n, seen)[:, None]
            slopes = torch.tensor(self.slopes, dtype=torch.float64).view(heads, -1, 1, 1)
            logits = logits + slopes * distance
        visible = torch.zeros(heads, n, seen, dtype=torch.bool)
        for head, live in enumerate(row.live):
            for i in range(n):
                now = seen - n + i
                reach = now if self.window is None else self.window - 1
                visible[head, i, [p for p in live if now - reach <= p <= now]] = True
        return logits.masked_fill(~visible[:, None], -math.inf).softmax(dim=-1)

    def _learn(self, row: Row, probability: Tensor) -> None:
        n, name = probability.shape[2], self.name
        received = probability.mean(dim=1).sum(dim=1)  # (H, T), summed over the chunk's queries
        if name in ("h2o", "qh2o"):
            row.score = row.score + received
        elif name in ("vlen", "qvlen"):
            added = received * row.given_v.norm(dim=-1)
            row.score = row.score + n * added / added.sum(dim=-1, keepdim=True)
        elif name == "tova":
            row.score = probability[:, :, -1].mean(dim=(0, 1)).expand(len(row.live), -1)
        elif name == "snapkv":
            size = self.options.window
            last = probability[:, :, -size:].mean(dim=1).sum(dim=1) / size
            if n >= size:
                row.score = self._pooled(row, last)
            else:
                row.score = row.score * (1 - n / size) + last

    def _pooled(self, row: Row, mass: Tensor) -> Tensor:
        """Each token before the window, averaged with its neighbours there; zeros beyond."""
        half, before = self.options.pool // 2, row.seen - self.options.window
        result = mass.clone()
        for head, live in enumerate(row.live):
            order = sorted(p for p in live if p < before)
            for at, position in enumerate(order):
                near = order[max(0, at - half) : at + half + 1]
                result[head, position] = mass[head, near].sum() / self.options.pool
        return result

    def _scores(self, row: Row, head: int) -> Tensor:
        """(T,), of which the live ones count."""
        score, live, name = row.score[head], row.live[head], self.name
        if name in ("h2o", "vlen", "qh2o", "qvlen") and self.options.normalize:
            score = score / torch.arange(row.seen, 0, -1)
        if name in ("qh2o", "qvlen"):
            error = (row.given_k - row.k).norm(dim=-1) + (row.given_v - row.v).norm(dim=-1)
            mix = self.options.mix
            return mix * _unit(score, live) - (1 - mix) * _unit(error[head], live)
        if name == "knorm":
            return -row.given_k[head].norm(dim=-1)
        if name == "keydiff":
            unit = row.k[head] / row.k[head].norm(dim=-1, keepdim=True)
            mean = unit[live].mean(dim=0)
            return -(unit @ mean) / mean.norm()
        if name == "random":
            seed = self.options.seed << 8
            return torch.tensor([_hash(_hash(p + seed) + head) >> 8 for p in range(row.seen)])
        return torch.arange(row.seen) if name == "window" else score

    def _worth(self, row: Row, head: int) -> dict[int, float]:
        """What each live position is worth, all things considered."""
        scores, worth = self._scores(row, head).double(), {}
        for p in row.live[head]:
            kept = p < self.options.sinks or p >= row.seen - self.recent
            if self.name != "window":
                kept = kept or self.options.keep_from <= p < self.options.keep_to
            worth[p] = math.inf if kept else float(scores[p])
            gone = self.window is not None and row.seen - p >= self.window  # for the next query
            if gone or math.isnan(worth[p]):
                worth[p] = -math.inf
        return worth

    def _evict(self, row: Row) -> None:
        heads = range(len(row.live))
        if self.adaptive:
            self._evict_together(row)
            return
        for head in heads:
            if len(row.live[head]) > self.budget:
                worth = self._worth(row, 0 if self.shared else head)
                ordered = sorted((value, p) for p, value in worth.items())
                row.live[head] = [p for _, p in self._cut(ordered, self.budget)]

    def _evict_together(self, row: Row) -> None:
        """The worst of all heads go, but none of a head's best."""
        entries = []
        for head, live in enumerate(row.live):
            worth = self._worth(row, head)
            best = sorted(live, key=lambda p: (worth[p], p), reverse=True)
            for p in best[: int(self.floor * self.budget)]:
                worth[p] = math.inf if worth[p] > -math.inf else worth[p]
            entries += [(value, p, head) for p, value in worth.items()]
        kept = self._cut(sorted(entries), self.budget * len(row.live))
        row.live = [[p for _, p, h in kept if h == head] for head in range(len(row.live))]

    def _cut(self, ordered: list[Any], count: int) -> list[Any]:
        """The last `count`; remembers how close the decision was."""
        cut = max(0, len(ordered) - count)
        if 0 < cut < len(ordered):
            low, high = ordered[cut - 1][0], ordered[cut][0]
            if math.isfinite(low) and math.isfinite(high) and high > low:
                self.gap = min(self.gap, (high - low) / max(1.0, abs(high)))
        return ordered[cut:]


def _unit(x: Tensor, live: list[int]) -> Tensor:
    low, high = x[live].min(), x[live].max()
    return (x - low) / (high - low) if high > low else torch.zeros_like(x)


def _hash(x: int) -> int:
    """Wellons' lowbias32."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
