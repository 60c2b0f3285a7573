"""Centres: the scales and the mean that are taken out of a head's keys before they are encoded.

Before the rotary embedding R, the keys of a head are a constant plus a little, and after it they
are the rotated constant plus a little. The channels of this rest have unequal sizes, and so have
those of the queries. A code's error is about the same in all channels (of a group, and after a
Hadamard rotation), and a score adds it up weighted with the query's channels. So both vectors
should be equally large in each channel: keys are divided, and queries multiplied, by the scale
s = (mean square of the key's rest / mean square of the queries) ** (1/4), which changes no score.
SmoothQuant (arXiv 2211.10438) balances activations and weights in this way.

The slot of a token at position p holds k / s - R(p) m, where m is the mean of the scaled keys. The
two channels that R rotates together share a scale, so that the order does not matter. Attention
multiplies q by s, and adds (s q) . R(p) m to the score of q for the slot. It is the sum over the
frequencies f of a_f cos(p f) + b_f sin(p f), where a and b depend on q, s and m alone.

Encoding, attention and decoding use the same numbers. So frequencies other than the model's, or an
error of m or s, make codes less precise, but no result wrong. Scales are powers of 2, so that
scaling costs no precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.planes import LAST
from kvkeep.rotary import Rotary

_FEWEST_ROWS, _MOST_ROWS = 8192, 1 << 20
"""Rows of a table. Higher positions use its last row."""
_NEAR = 32  # half a KV_BLOCK of native/kernel.h
_POWERS = 4  # POWERS of native/centre.h
_MOST_ERROR = 3e-7
"""The largest error of a cosine or sine that is computed from powers of the distance."""
_SINKS = 4
"""Number of first positions that do not count: their keys differ from all other keys."""
_FEWEST_TOKENS = 8
"""The fewest tokens for which a mean is an advantage."""
_MOST_DOUBLINGS = 8
"""The largest scale is 2 ** 8, and the smallest 2 ** -8."""


class Near(NamedTuple):
    """Cosines and sines of 0.5, 1.5, ... 31.5 positions, for the native library.

    Within 32 positions, cosines of small frequencies are sums of few even powers of the distance,
    and sines of odd powers. So one row for each power stands for all frequencies that are small.

    Attributes:
        numbers: float32, one after the other: of 31.5 positions, the cosines (F,), then the sines
            (F,) of all frequencies; the rows (`rows`, 32) for cosines: the first frequencies, then
            the powers 0, 2, 4, 6 of the distance in units of 32; those for sines, with the powers
            1, 3, 5, 7; and, if there are powers, their factors in the cosines (4, F'), then the
            sines (4, F') of the other frequencies.
        rows: number of rows for cosines.
    """

    numbers: Tensor
    rows: int

    @classmethod
    def of(cls, frequencies: Tensor, device: torch.device) -> Near:
        """The turns of frequencies float64 (F,)."""
        places = torch.arange(_NEAR, dtype=torch.float64) + 0.5
        angles = frequencies[:, None] * places
        exact = torch.stack([angles.cos(), angles.sin()])  # (2, F, 32)
        distance = places / _NEAR
        even = torch.stack([distance ** (2 * k) for k in range(_POWERS)])
        powers = torch.stack([even, even * distance])  # (2, 4, 32)
        factors = exact @ torch.linalg.pinv(powers)  # (2, F, 4)
        error = (factors @ powers - exact).abs().amax(dim=(0, 2))
        other = (error > _MOST_ERROR).nonzero()
        first = int(other.max()) + 1 if len(other) else 0
        first += (len(frequencies) - first) % 8  # the library reads the other frequencies by eights
        if first + _POWERS >= len(frequencies):
            first, powers = len(frequencies), powers[:, :0]
        rows = torch.cat([exact[:, :first], powers], dim=1)
        parts = exact[..., -1], rows, factors[:, first:].mT
        numbers = torch.cat([part.flatten() for part in parts])
        return cls(numbers.to(device, torch.float32), rows.shape[1])


class Turns(NamedTuple):
    """Cosines and sines by position, shared by all heads and layers.

    Attributes:
        table: float32 (P, 2 F); row p holds the cosines of p f for each of F frequencies f, then
            the sines.
        near: the turns of few positions.
        pairs: number of frequencies that rotate a pair of dimensions. One more frequency, 0, stands
            for the dimensions that are not rotated, if there are any.
        interleaved: pairing of dimensions; see `Rotary`.
    """

    table: Tensor
    near: Near
    pairs: int
    interleaved: bool

    @classmethod
    def of(cls, rotary: Rotary | None, width: int, rows: int, device: torch.device) -> Turns:
        """The turns for keys of a width, with at least `rows` rows, up to the most rows of a table.

        Args:
            rotary: the keys' rotary embedding; None: keys are not rotated.
        """
        inv_freq = torch.empty(0) if rotary is None else rotary.inv_freq.detach().cpu().double()
        interleaved = rotary is not None and rotary.interleaved
        key = (tuple(inv_freq.tolist()), interleaved, 2 * len(inv_freq) < width, device)
        known = _tables.get(key)
        if known is None or not known.covers(rows):
            if len(_tables) == _MOST_TABLES:
                _tables.clear()
            known = _tables[key] = cls._new(inv_freq, interleaved, key[2], rows, device)
        return known

    @classmethod
    def _new(
        cls, inv_freq: Tensor, interleaved: bool, rest: bool, rows: int, device: torch.device
    ) -> Turns:
        count = min(_MOST_ROWS, max(_FEWEST_ROWS, 1 << (rows - 1).bit_length()))
        with torch.inference_mode(False):
            frequencies = torch.cat([inv_freq, inv_freq.new_zeros(1)]) if rest else inv_freq
            angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
            table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device, torch.float32)
            near = Near.of(frequencies, device)
        return cls(table, near, len(inv_freq), interleaved)

    def covers(self, rows: int) -> bool:
        """Whether the table has `rows` rows, or the most rows of a table."""
        return self.most >= rows

    @property
    def most(self) -> int:
        """The number of positions in the table."""
        return LAST if len(self.table) >= _MOST_ROWS else len(self.table)

    def at(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 (*position.shape, F) each."""
        index = position.clamp(0, len(self.table) - 1).to(torch.int64)
        cos, sin = self.table[index].chunk(2, dim=-1)
        return cos, sin

    def paired(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second dimension of each pair of x (..., D): (..., pairs) each."""
        turning = x[..., : 2 * self.pairs]
        if self.interleaved:
            return turning[..., 0::2], turning[..., 1::2]
        return turning[..., : self.pairs], turning[..., self.pairs :]

    def unpaired(self, first: Tensor, second: Tensor) -> Tensor:
        """The inverse of `paired`, for the rotated dimensions."""
        if self.interleaved:
            return torch.stack([first, second], dim=-1).flatten(-2)
        return torch.cat([first, second], dim=-1)


_tables: dict[object, Turns] = {}
_MOST_TABLES = 64


class Centre(NamedTuple):
    """The scales and the mean key of each head of a layer, and its rotation.

    Attributes:
        held: float32 (B, H, 2, Dk): the mean m, before the rotary embedding, and the scales s.
        turns: the rotary embedding as a table.
    """

    held: Tensor
    turns: Turns

    @classmethod
    def of_mean(cls, mean: Tensor, turns: Turns) -> Centre:
        """A centre with the mean float32 (B, H, Dk), and scales of 1."""
        return cls(torch.stack([mean, torch.ones_like(mean)], dim=2), turns)

    @property
    def scale(self) -> Tensor:
        """s, (B, H, 1, Dk)."""
        return self.held[:, :, 1:]

    def queries(self, q: Tensor) -> Tensor:
        """Queries (B, Hq, n, Dk) times the scales."""
        group = q.shape[1] // self.held.shape[1]
        return q * self.scale.repeat_interleave(group, dim=1).to(q.dtype)

    def at(self, position: Tensor) -> Tensor:
        """R(p) m for positions (B|1, 1|H, S): float32 (B, H, S, Dk)."""
        turns, mean = self.turns, self.held[:, :, :1]
        cos, sin = (x[..., : turns.pairs] for x in turns.at(position))
        a, b = turns.paired(mean)
        turned = turns.unpaired(a * cos - b * sin, b * cos + a * sin)
        rest = mean[..., 2 * turns.pairs :].expand(*turned.shape[:3], -1)
        return torch.cat([turned, rest], dim=-1)

    def without(self, keys: Tensor, position: Tensor) -> Tensor:
        """Keys (B, H, n, Dk) at positions (n,) or (B, n), or expanded over heads (B, 1|H, n), as
        slots hold them; in at least float32."""
        if position.dim() < 3:
            position = position.reshape(-1, 1, position.shape[-1])
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        return wide / self.scale - self.at(position)

    def added(self, keys: Tensor, position: Tensor) -> Tensor:
        """The inverse of `without`, for positions (B|1, 1|H, S) and in the keys' dtype."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        return ((keys.to(dtype) + self.at(position)) * self.scale).to(keys.dtype)

    def of_rows(self, index: Tensor) -> Centre:
        """The centre with row index[i] as row i."""
        return self._replace(held=self.held.index_select(0, index.to(self.held.device)))

    def of_head(self, head: int) -> Centre:
        """The centre of one kv head."""
        return self._replace(held=self.held[:, head : head + 1])


class Asked(NamedTuple):
    """Queries (B, Hq, n, Dk) at positions (n,) or (B, n)."""

    q: Tensor
    position: Tensor


def measured(
    k: Tensor, position: Tensor, tokens: int, turns: Turns, asked: Asked | None = None
) -> Centre:
    """The centre of each row and head, measured on the first `tokens` tokens except the very first.
    A row with too few tokens has means of 0 and scales of 1.

    Args:
        k: the first keys, (B, H, n, Dk), after the rotary embedding.
        position: their positions, (n,) or (B, n); negative for empty slots.
        asked: the queries of these or of later tokens; None: scales of 1.
    """
    rows, heads, _, width = k.shape
    used, last = _used(position.to(k.device), rows, tokens)
    if not last:
        return Centre.of_mean(k.new_zeros((rows, heads, width), dtype=torch.float32), turns)
    first = position.to(k.device)[..., :last].reshape(-1, 1, last)
    cos, sin = (x[..., : turns.pairs] for x in turns.at(first))
    # Contiguous, so that rounding does not depend on strides.
    keys = k[:, :, :last].detach().float().contiguous()
    a, b = turns.paired(keys)
    turned = torch.cat(
        [turns.unpaired(a * cos + b * sin, b * cos - a * sin), keys[..., 2 * turns.pairs :]], dim=-1
    )
    mean = _mean_of(turned, used)
    scale = torch.ones_like(mean)
    if asked is not None:
        of_queries, last = _used(asked.position.to(k.device), rows, tokens)
        queries = asked.q[:, :, :last].detach().float().contiguous().square()
        own = _mean_of(queries, of_queries).view(rows, heads, -1, width).mean(dim=2)
        rest = _mean_of((turned - mean[:, :, None]).square(), used)
        scale = _balancing(_by_pair(rest, turns), _by_pair(own, turns))
    few = (used.sum(dim=1) < _FEWEST_TOKENS)[:, None] | ~mean.isfinite().all(dim=-1)
    held = torch.stack([mean / scale, scale], dim=2)
    neutral = torch.tensor([[0.0], [1.0]], device=held.device)
    return Centre(torch.where(few[:, :, None, None], neutral, held), turns)


def _used(position: Tensor, rows: int, tokens: int) -> tuple[Tensor, int]:
    """Which of the tokens at `position`, (n,) or (B, n), count: the first `tokens` tokens of each
    row, except those at the first positions. Bool (B, last), and `last`: none of the tokens from
    this index on counts."""
    position = position.reshape(-1, position.shape[-1]).expand(rows, -1)
    counts = (position >= _SINKS) & ((position >= 0).cumsum(dim=1) <= tokens)
    last = int(counts.nonzero()[:, 1].max()) + 1 if bool(counts.any()) else 0
    return counts[:, :last], last


def _mean_of(x: Tensor, used: Tensor) -> Tensor:
    """The mean of x, (B, heads, n, Dk), over the tokens that count, bool (B, n)."""
    total = x.masked_fill(~used[:, None, :, None], 0.0).sum(dim=2)
    return total / used.sum(dim=1).clamp(min=1)[:, None, None]


def _by_pair(x: Tensor, turns: Turns) -> Tensor:
    """x (B, H, Dk) averaged over the channels of each rotated pair."""
    first, second = turns.paired(x)
    both = (first + second) / 2
    return torch.cat([turns.unpaired(both, both), x[..., 2 * turns.pairs :]], dim=-1)


def _balancing(keys: Tensor, queries: Tensor) -> Tensor:
    """The scales, powers of 2, for mean squares of keys and queries, (B, H, Dk) each. Channels
    smaller than a thousandth of the largest channel count as a thousandth of it. All scales are 1
    if all channels are 0."""
    keys, queries = (x.clamp(min=x.amax(dim=-1, keepdim=True) * 1e-6) for x in (keys, queries))
    doublings = ((keys / queries).log2() / 4).round().nan_to_num(0.0, 0.0, 0.0)
    return doublings.clamp(-_MOST_DOUBLINGS, _MOST_DOUBLINGS).exp2()
