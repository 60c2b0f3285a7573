"""Intervals are held to published values and to normal theory."""

from __future__ import annotations

import pytest
import torch

from kvkeep.evals.intervals import of_mean, of_share


def test_a_share():
    # R. G. Newcombe, Stat. Med. 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for hits, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert of_share(hits / count, count) == pytest.approx((low, high), abs=1e-4)
    assert of_share(1.0, 5)[1] == 1.0


def test_a_mean_of_independent_values():
    values = torch.randn(4, 1600, generator=torch.Generator().manual_seed(1))
    low, high = of_mean(values)
    assert (high - low) / 2 == pytest.approx(1.96 / 80, rel=0.1)
    assert low < values.mean() < high
    assert of_mean(values) == (low, high)


def test_values_alike_within_a_block_count_once():
    values = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    low, high = of_mean(values.repeat_interleave(16, dim=1))
    assert (high - low) / 2 == pytest.approx(float(values.std()) * 0.196, rel=0.15)


def test_one_value():
    assert of_mean(torch.tensor([[0.5]])) == (0.5, 0.5)
