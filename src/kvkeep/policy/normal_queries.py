"""Logits of slots for queries that are normally distributed, by the native library or by torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvkeep.native_library import LIBRARY
from kvkeep.policy.rule import Rule
from kvkeep.rotary import Rotary

_EXPECTED, QUERIES = Struct("=16qd"), Struct("=10q")
"""KvExpected and KvQueries of native/abi.h."""

_STATE = ("count", "sum", "products")
"""The names of the sums in a policy's state."""


class Queries(NamedTuple):
    """Sums over the observed queries of each row, before the rotary embedding, all fp32.

    Attributes:
        number: (B, 1, 1, 1), how many there are.
        total: (B, Hq, 1, D), the sum of the queries q.
        products: (B, Hq, D, D), the sum of q^T q.
    """

    number: Tensor
    total: Tensor
    products: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Queries:
        """The sums in a policy's state."""
        return cls(*(state[name] for name in _STATE))

    @property
    def state(self) -> dict[str, Tensor]:
        """The state with these sums."""
        return dict(zip(_STATE, self, strict=True))

    @classmethod
    def copied(cls, state: Mapping[str, Tensor], more: list[int], heads: int, width: int) -> Self:
        """Copies of the sums in a state, which may be empty; each row's number is increased by
        `more`. `heads`, `width`: Hq, D."""
        number = torch.tensor(more, dtype=torch.float32).view(-1, 1, 1, 1)
        if not state:
            sums = number.new_zeros(len(more), heads, 1 + width, width).split([1, width], dim=2)
            return cls(number, *(x.contiguous() for x in sums))
        _, total, products = (state[name] for name in _STATE)
        return cls(number + state[_STATE[0]], total.clone(), products.clone())

    def packed(self, row: int, head: int, rotary: Rotary | None, rule: Rule) -> bytes:
        """A KvQueries of native/abi.h: of the rows from `row` and the query heads from `head` on,
        for the steps of a rule with a `future`."""
        turns = (0, 0, 0, 0)
        if rotary is not None:
            frequencies = rotary.inv_freq
            turns = frequencies.data_ptr(), len(frequencies), rotary.first, rotary.interleaved
        _, heads, _, width = self.total.shape
        place = 4 * (row * heads + head) * width
        total, products = self.total.data_ptr() + place, self.products.data_ptr() + place * width
        addresses = self.number.data_ptr() + 4 * row, total, products
        return QUERIES.pack(*addresses, heads, *turns, rule.interval, rule.future)


class MeanRotation(NamedTuple):
    """The mean of a rotary embedding's rotations over adjacent positions.

    Attributes:
        cosines, sines: (1|B, 1, 1, R/2) fp32, of each pair of dimensions.
    """

    rotary: Rotary
    cosines: Tensor
    sines: Tensor

    @classmethod
    def after(
        cls, rotary: Rotary, newest: int | Tensor, count: int, device: torch.device
    ) -> MeanRotation:
        """Of the `count` positions after `newest`, int64 (B, 1, 1) or one number for all rows.

        The mean of exp(i f p) over n adjacent positions p is exp(i f m) at their middle m, times
        sin(n f / 2) / (n sin(f / 2)).
        """
        frequencies = rotary.inv_freq.to(device, torch.float32)
        last = torch.as_tensor(newest, device=device).reshape(-1, 1, 1, 1)
        angle = (last + (count + 1) / 2) * frequencies
        turns = frequencies / (2 * math.pi)
        shrunk = torch.sinc(turns * count) / torch.sinc(turns)
        return cls(rotary, angle.cos() * shrunk, angle.sin() * shrunk)

    def matrix(self, width: int) -> Tensor:
        """As a matrix (1|B, 1, D, D) that multiplies row vectors."""
        unit = torch.eye(width, device=self.cosines.device).expand(len(self.cosines), 1, -1, -1)
        return self.rotary.scaled(unit, self.cosines, self.sines)


def expected_logits(
    keys: Tensor, queries: Queries, rotation: MeanRotation | None, scale: float
) -> Tensor:
    """The logarithm of the expectation of exp(scale * q . k) over normally distributed queries q
    with the mean and the covariance of the observed ones, turned by `rotation`.

    Args:
        keys: fp32 (B, H, S, D).
        rotation: the queries' rotation; None: none.

    Returns:
        fp32 (B, H, G, S), where G is the number of query heads of a kv head.
    """
    if LIBRARY is None or not keys.is_cpu:
        return reference_logits(keys, queries, rotation, scale)
    rows, heads, slots, width = keys.shape
    group = queries.total.shape[1] // heads
    count, total, products, keys = (x.contiguous() for x in (*queries, keys))
    means = () if rotation is None else (rotation.cosines, rotation.sines)
    turned = [x.expand(rows, -1, -1, -1).contiguous() for x in means]
    pairs, first, interleaved = 0, 0, False
    if rotation is not None:
        pairs = rotation.cosines.shape[3]
        first, interleaved = rotation.rotary.first, rotation.rotary.interleaved
    out = keys.new_empty((rows, heads, group, slots))
    call = _EXPECTED.pack(
        *(x.data_ptr() for x in (keys, total, products, count)),
        *([x.data_ptr() for x in turned] or (0, 0)),
        out.data_ptr(),
        *(rows, heads, slots, group, width),
        *(pairs, first, interleaved, torch.get_num_threads(), scale),
    )
    if LIBRARY.kv_expected(call):
        raise MemoryError(f"no scratch memory for the expected attention to {slots} slots")
    return out


def reference_logits(
    keys: Tensor, queries: Queries, rotation: MeanRotation | None, scale: float
) -> Tensor:
    """`expected_logits` by torch, on any device."""
    rows, heads, _, width = keys.shape
    count = queries.number.clamp(min=1)
    mean = queries.total / count  # (B, Hq, 1, D)
    spread = queries.products / count - mean.transpose(2, 3) * mean
    if rotation is not None:
        turn = rotation.matrix(width)
        mean, spread = mean @ turn, turn.transpose(2, 3) @ spread @ turn
    # One product for all query heads of a group: (B * H, S, G * D)
    mean = mean.reshape(rows * heads, 1, -1)
    spread = spread.reshape(rows * heads, -1, width, width).transpose(1, 2).flatten(2)
    own = keys.flatten(0, 1)
    logits = torch.baddbmm(mean, own, spread, alpha=scale / 2).view(*own.shape[:2], -1, width)
    logits = logits.mul_(own[:, :, None]).sum(dim=-1).mul_(scale)
    return logits.view(rows, heads, *logits.shape[1:]).transpose(2, 3)
