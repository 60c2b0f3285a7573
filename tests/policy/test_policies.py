"""Policies, as small literal tensors."""

from __future__ import annotations

import pytest
import torch

from kvkeep.errors import SpecError
from kvkeep.planes import POSITION, Reach
from kvkeep.policy import H2O, KeepAll, Observation, Pyramid, Scored, Window
from kvkeep.spec import CacheSpec


def victims(policy, count, *rows):
    planes = {POSITION: torch.tensor(rows, dtype=torch.int32)[:, None]}
    return policy.victims(count, planes, Observation())[:, 0].sort(dim=1).values.tolist()


def test_window_evicts_the_oldest_first_wherever_it_lies():
    assert victims(Window(4), 2, [5, 2, 4, 3, 6]) == [[1, 3]]


def test_window_evicts_empty_slots_before_any_token():
    assert victims(Window(4), 2, [-1, 0, 1, -1], [3, 0, 1, 2]) == [[0, 3], [1, 2]]


def test_window_spares_its_sinks():
    assert victims(Window(2, sinks=2), 2, [0, 1, 2, 3, 4]) == [[2, 3]]


def test_window_spares_a_range():
    policy = Window(2, sinks=1, keep_from=2, keep_to=4)
    assert policy.budget == 5
    assert victims(policy, 2, [0, 1, 2, 3, 4, 5, 6]) == [[1, 4]]
    allowed = [slot for slot in range(9) if policy.reach.allows(8, slot)]
    assert allowed == [0, 2, 3, 7, 8]


def test_window_budget_and_reach():
    assert Window(1024, sinks=4).budget == 1028
    assert Window(1024, sinks=4).reach == Reach(1024, 4)


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (-1, 0), (1, -1)])
def test_window_of_nothing(size, sinks):
    with pytest.raises(SpecError, match="at least 1"):
        Window(size, sinks)


def test_on_a_layer_with_its_own_window():
    assert KeepAll().within(8) == Window(8)
    assert Window(4, 2).within(8) == Window(4, 2)
    assert Window(100, 2).within(8) == Window(8)


def test_keep_all_has_no_budget():
    assert KeepAll().budget is None
    assert KeepAll().reach is None


def test_a_pyramid_shares_what_is_not_protected():
    """Four layers of 20 tokens, 4 protected: 16 to share, a quarter of it in the last layer."""
    policy = Pyramid(H2O(20, recent=4), beta=4)
    budgets = [policy.in_layer(index, 4).budget for index in range(4)]
    assert budgets == [32, 24, 16, 8]
    assert sum(budgets) == 4 * 20


def test_a_pyramid_of_one_layer_is_its_policy():
    layer = CacheSpec.parse("pyramid(h2o:8)").layer()
    layer.step(*torch.randn(3, 1, 2, 20, 16), scale=0.25)
    assert layer.length == 8
    assert isinstance(layer.policy, Scored)
