"""Intervals are held to published values and to normal theory."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from kvkeep_lab.evals.intervals import _student, of_mean, of_scores, of_share


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


def test_scores_of_0_and_1_have_the_interval_of_a_share():
    assert of_scores([1.0] * 81 + [0.0] * 182) == of_share(81 / 263, 263)
    assert of_scores([1.0] * 5) == of_share(1.0, 5)


def test_scores_between_have_the_interval_of_a_mean():
    # Student's own data (Biometrika 6, 1908): ten differences, mean 1.58, deviation 1.23.
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    low, high = of_scores([hour / 10 for hour in hours])
    assert (low * 10, high * 10) == pytest.approx((0.7001, 2.4599), abs=1e-3)
    assert of_scores([0.9, 1.0]) == pytest.approx((0.95 - 12.7062 * 0.05, 1))
    assert of_scores([0.25] * 5) == of_share(0.25, 5)  # equal scores show no spread
    assert of_scores([0.25]) == of_share(0.25, 1)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (30, 2.0423), (999, 1.9623)]
)
def test_quantiles_of_student(freedom, quantile):
    # As printed in tables of the t distribution.
    assert _student(freedom) == pytest.approx(quantile, abs=6e-5)


def test_intervals_of_scores_cover_the_mean():
    draw = random.Random(0)
    for levels, count in (((0, 0.25, 0.5, 0.75, 1), 10), ((0, 0, 0.3, 1), 20), ((0, 1), 20)):
        intervals = [of_scores(draw.choices(levels, k=count)) for _ in range(2000)]
        covered = sum(low <= statistics.fmean(levels) <= high for low, high in intervals)
        assert 0.925 < covered / 2000 < 0.98
