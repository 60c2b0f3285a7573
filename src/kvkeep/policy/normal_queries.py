"""What is known of queries that are normally distributed, and their logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvkeep.policy.rule import Rule
from kvkeep.rotary import Rotary

QUERIES = Struct("=10q")
"""KvQueries of native/abi.h."""

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
    def of(cls, state: Mapping[str, Tensor]) -> Self:
        """The sums in a policy's state."""
        return cls(*(state[name] for name in _STATE))

    @property
    def state(self) -> dict[str, Tensor]:
        """The state with these sums."""
        return dict(zip(_STATE, self, strict=True))

    @classmethod
    def copied(
        cls, state: Mapping[str, Tensor], more: Sequence[int], heads: int, width: int
    ) -> Self:
        """Copies of the sums in a state, which may be empty; each row's number is increased by
        `more`. `heads`, `width`: Hq, D."""
        number = torch.tensor(more, dtype=torch.float32).view(-1, 1, 1, 1)
        if not state:
            shape = len(more), heads
            return cls(number, torch.zeros(*shape, 1, width), torch.zeros(*shape, width, width))
        held = cls.of(state)
        return cls(number + held.number, held.total.clone(), held.products.clone())

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
    rows, heads, _, width = keys.shape
    count = queries.number.clamp(min=1)
    mean = queries.total / count  # (B, Hq, 1, D)
    spread = queries.products / count - mean.transpose(2, 3) * mean
    if rotation is not None:
        turn = rotation.matrix(width)
        mean, spread = mean @ turn, turn.transpose(2, 3) @ spread @ turn
    # One product for each query head of a group, so that no more memory is needed than for keys.
    own = keys.flatten(0, 1)
    each = zip(
        mean.reshape(rows * heads, -1, 1, width).unbind(1),
        spread.reshape(rows * heads, -1, width, width).unbind(1),
        strict=True,
    )
    logits = [torch.baddbmm(x, own, y, alpha=scale / 2).mul_(own).sum(dim=-1) for x, y in each]
    return torch.stack(logits, dim=1).mul_(scale).view(rows, heads, len(logits), -1)
