"""Tools for testing a new policy, codec, storage or backend: an oracle, and all valid combinations.

`check_policy("mine:8")` checks the requirements on every policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from kvkeep import codec as codecs
from kvkeep import policy as policies
from kvkeep.codec import CODECS, Codec
from kvkeep.codec.base import without_warnings
from kvkeep.errors import SpecError
from kvkeep.layer.layer import LayerCache
from kvkeep.packing import PLAIN
from kvkeep.planes import PlaneSpec, Reach
from kvkeep.spec import CacheSpec
from kvkeep.storage import STORAGES

EXAMPLES = {name: part.example for name, part in policies.PARTS.items() if part.example}
"""A small spec of each policy except `kvzap`."""

CODEC_EXAMPLES = {name: part.example for name, part in codecs.PARTS.items()}
"""A small spec of each codec."""

CODEC_ERRORS = {name: part.error for name, part in codecs.PARTS.items()}
"""The largest error of each codec, see `kvkeep.registry.Part`. A codec of your own needs an entry
here."""


def conformance_specs() -> Iterator[CacheSpec]:
    """Every valid policy x codec x storage, with small options."""
    for policy in EXAMPLES:
        for codec in CODECS:
            for storage in STORAGES:
                parts = f"{EXAMPLES[policy]}+{CODEC_EXAMPLES.get(codec, codec)}@{storage}"
                spec = CacheSpec.parse(parts)
                if spec.storage.limited and spec.policy.budget is None:
                    spec = CacheSpec.parse(f"{parts}:256")
                try:
                    spec.layer()
                except SpecError:
                    continue  # this combination is invalid
                yield spec


@dataclass(frozen=True)
class _Token:
    position: int
    k: Tensor  # (H, Dk)
    v: Tensor  # (H, Dv)


@dataclass
class OracleLayer:
    """A simple layer that keeps all tokens and computes one query at a time, in float64.

    It implements windows, which begin at a multiple of their size if `chunked`, but no slots,
    segments or eviction. For policies that evict visible tokens, the caller passes the positions
    held; for lossy codecs, the caller feeds tokens that were encoded and decoded.
    """

    reach: Reach | None = None
    window: int | None = None
    chunked: bool = False
    rows: list[list[_Token | None]] = field(default_factory=list)  # None: padding

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        *,
        scale: float,
        until: Tensor | None = None,
        live: list[list[set[int]]] | None = None,
    ) -> Tensor:
        """Like `LayerCache.step`, with positions and `until` (B, n).

        Args:
            live: positions held before this chunk, by row and head; None: all.
        """
        if not self.rows:
            self.rows = [[] for _ in range(k.shape[0])]
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
        for b, row in enumerate(self.rows):
            own = position[b].tolist()
            row += [
                _Token(place, k[b, :, i], v[b, :, i]) if place >= 0 else None
                for i, place in enumerate(own)
            ]
            kept = None if live is None else [{*head, *own} for head in live[b]]
            before = row[: len(row) - len(own)]
            now = max((token.position for token in before if token is not None), default=-1)
            for i, place in enumerate(own):
                now = max(now, place)  # padding sees the same as the token before it
                last = now if until is None or place < 0 else max(now, int(until[b, i]))
                out[b, :, i] = self._attend(q[b, :, i].double(), row, now, last, scale, kept)
        return out

    def _attend(
        self,
        q: Tensor,
        row: list[_Token | None],
        now: int,
        last: int,
        scale: float,
        live: list[set[int]] | None,
    ) -> Tensor:
        tokens = [token for token in row if token is not None and token.position <= last]
        if not tokens:
            return torch.zeros(1, dtype=torch.float64)
        seen = [token for token in tokens if self._sees(now, token.position)]
        keys = torch.stack([token.k for token in seen], dim=1).double()  # (H, S, Dk)
        values = torch.stack([token.v for token in seen], dim=1).double()
        group = q.shape[0] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        scores = (keys @ q[:, :, None])[:, :, 0] * scale
        if live is not None:
            gone = [[token.position not in head for token in seen] for head in live]
            mask = torch.tensor(gone).repeat_interleave(group, dim=0)
            scores = scores.masked_fill(mask, -torch.inf)
        return (torch.softmax(scores, dim=1)[:, None] @ values)[:, 0]

    def _sees(self, now: int, position: int) -> bool:
        if self.window is not None:
            behind = now % self.window + 1 if self.chunked else self.window
            if now - position >= behind:
                return False
        reach = self.reach
        return reach is None or bool(reach.allows(now, position))

    def crop(self, tokens: int) -> None:
        """See `LayerCache.crop`."""
        if tokens:
            self.rows = [row[:tokens] for row in self.rows]

    def take_rows(self, index: list[int]) -> None:
        """See `LayerCache.take_rows`."""
        self.rows = [list(self.rows[i]) for i in index]

    def reset(self) -> None:
        """See `LayerCache.reset`."""
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
    """Check that a layer holds the tokens that the oracle was fed.

    Every live slot decodes to the key and value of its position, within `atol` and the codec's
    error; no position occurs twice; no token that the policy must keep is missing; and the bytes in
    use equal the number of slots times the bytes per slot that codec and policy declare.

    Raises:
        AssertionError: a check fails.
    """
    budget = layer.policy.at(layer.fed).budget
    held = layer.slots
    if not layer.cursor.record_past:
        assert layer.length <= layer.stats().capacity
        assert budget is None or held.surplus(budget) <= 0 or layer.policy.ragged
    assert layer.seen.tolist() == oracle.seen
    assert layer.slots.stats.live_bytes == promised_bytes(layer)
    heads = live_tokens(layer)
    for b, row in enumerate(oracle.rows):
        fed = {token.position: token for token in row if token is not None}
        now = len(fed) - 1
        for h, (place, keys, values) in enumerate(heads[b]):
            assert len(set(place)) == len(place), "a position is held twice"
            for x, name, codec in ((keys, "k", layer.key_codec), (values, "v", layer.value_codec)):
                given = [getattr(fed[position], name)[h].double() for position in place]
                if given:
                    exact = torch.stack(given)
                    error = (x - exact).norm(dim=-1)
                    allowed = CODEC_ERRORS.get(codec.name, 0.0) * exact.norm(dim=-1) + atol
                    assert bool((error <= allowed).all()), f"the error of {name} is {error.max()}"
            if budget is None or layer.policy.reach is not None:
                needed = {p for p in fed if oracle._sees(now + 1, p)}
                assert needed <= set(place), "a token that the next query sees was evicted"
        if budget is not None and not layer.cursor.record_past:
            assert sum(len(place) for place, _, _ in heads[b]) <= budget * len(heads[b])


def check_policy(spec: str, device: torch.device | str = "cpu") -> None:
    """Check the requirements on every policy, with each codec and storage that it can be combined
    with, for two rows, one with padding: queries attend to the kept slots and to their chunk, the
    budget is respected, the planes of a token move together, and decisions for a row do not depend
    on other rows.

    Args:
        spec: the policy's part of a spec, with a budget of at most 16 tokens and without `step`.
        device: the device of the slots.

    Raises:
        SpecError: the policy does not exist, or cannot be combined with any codec and storage.
        AssertionError: a requirement is not met.
    """
    CacheSpec.parse(spec)
    checked = 0
    for codec in CODECS:
        for storage in STORAGES:
            parts = f"{spec}+{CODEC_EXAMPLES.get(codec, codec)}@{storage}"
            try:
                with without_warnings():
                    layers = [CacheSpec.parse(parts).layer(capacity=64) for _ in range(3)]
            except SpecError:
                continue
            _check_rows(*layers, device=torch.device(device))
            checked += 1
    if not checked:
        raise SpecError(f"{spec} cannot be combined with any codec and storage; use keep_all")


def _check_rows(
    both: LayerCache, padded: LayerCache, other: LayerCache, *, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    pads, heads, width = 5, 2, 16
    oracle = OracleLayer(reach=both.policy.reach)
    start = 0
    for n in (11, 1, 1, 8, 1, 4):
        q, k, v = (
            torch.randn(2, count, n, width, generator=generator)
            for count in (2 * heads, heads, heads)
        )
        position = torch.stack(
            [torch.arange(start, start + n) - pads, torch.arange(start, start + n)]
        )
        position = position.clamp(min=-1)
        start += n
        live = [[set(place) for place, _, _ in row] for row in live_tokens(both)] or None
        there = [x.to(device) for x in (q, k, v, position)]
        out = both.step(*there, scale=0.25).cpu()
        expected = oracle.step(
            q, k, v, position, scale=0.25, live=live if both.policy.reach is None else None
        )
        if both.key_codec.layout == both.value_codec.layout == PLAIN:
            real = (position >= 0)[:, None, :, None]
            torch.testing.assert_close(out * real, expected.float() * real, atol=2e-5, rtol=1e-4)
        check_layer(both, oracle)
        for row, alone in enumerate((padded, other)):
            real = position[row] >= 0
            if real.any():
                own = [x[row : row + 1, :, real].to(device) for x in (q, k, v)]
                place = position[row, real].to(device)
                alone.step(own[0], own[1], own[2], place, scale=0.25)
                places = [sorted(place) for place, _, _ in live_tokens(alone)[0]]
                together = [sorted(place) for place, _, _ in live_tokens(both)[row]]
                assert places == together, f"row {row} keeps {together}, alone {places}"


def live_tokens(layer: LayerCache) -> list[list[tuple[list[int], Tensor, Tensor]]]:
    """For each row and head: the positions held, with their keys and values in float64 on the CPU,
    over all segments."""
    geometry = layer.history.geometry
    if geometry is None:
        return []
    rows, heads = geometry.rows, geometry.heads
    found: list[list[list[tuple[Tensor, Tensor, Tensor]]]]
    found = [[[] for _ in range(heads)] for _ in range(rows)]
    for segment in layer.slots.segments():
        keys = segment.keys(torch.float64, segment.own(layer.writer.centre)).cpu()
        values = segment.values(torch.float64).cpu()
        position = segment.position.cpu()
        own = range(heads) if segment.head is None else [segment.head]
        held = range(rows) if segment.rows is None else segment.rows.tolist()
        for i, b in enumerate(held):
            # All rows may share a segment, though each row has a centre of its own.
            place_of, k, v = (x[min(i, len(x) - 1)] for x in (position, keys, values))
            for at, h in enumerate(own):
                place = place_of[at % len(place_of)]
                live = place >= 0
                found[b][h].append((place[live], k[at, live], v[at, live]))
    return [[_joined(parts) for parts in row] for row in found]


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[int], Tensor, Tensor]:
    if not parts:  # the layer is empty
        return [], torch.empty(0), torch.empty(0)
    place, keys, values = (torch.cat(list(x)) for x in zip(*parts, strict=True))
    return place.tolist(), keys, values


def promised_bytes(layer: LayerCache) -> int:
    """Bytes of a layer's slots, computed from the planes declared by its codecs and policy."""
    geometry = layer.history.geometry
    if geometry is None:
        return 0
    heads, dtype = geometry.heads, geometry.dtype
    total = 0
    for segment in layer.slots.segments():
        block, own_heads = segment.key_codec.block, heads if segment.head is None else 1
        keys, values = cast(Codec, segment.key_codec), cast(Codec, segment.value_codec)
        shared = [*keys.planes(geometry.key_width, dtype).values()]
        shared += values.planes(geometry.value_width, dtype).values()
        shared.append(PlaneSpec((block,), torch.int32, shared=not layer.policy.per_head))
        each = segment.position.shape[0] * sum(spec.slot_bytes(own_heads) for spec in shared)
        own = layer.policy.planes.values()
        rows = geometry.rows if segment.rows is None else len(segment.rows)
        each += rows * sum(spec.slot_bytes(own_heads) for spec in own)
        total += each * (segment.slots // block)
    return total


def example_planes(layer: LayerCache) -> dict[str, Tensor]:
    """A copy of all planes of a layer, to check that a failed call changed nothing."""
    parts = layer.state().copy().parts
    return {f"{part}.{name}": planes[name] for part, planes in parts.items() for name in planes}


__all__ = [
    "CODEC_ERRORS",
    "OracleLayer",
    "check_layer",
    "check_policy",
]
