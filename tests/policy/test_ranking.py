"""The choice of victims, compiled and in torch: literal cases, then that both are the same."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvkeep import native_library
from kvkeep.planes import POSITION, own_window
from kvkeep.policy import Observation, ranking
from kvkeep.policy.ranking import Protection, least_worthy, lowest, worth


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(ranking, "LIBRARY", None)
    elif not native_library.available:
        pytest.skip(native_library.reason)


def victims(score, position, count, kept=None, newest=9, window=None, chunked=False):
    score = None if score is None else torch.tensor([[score]], dtype=torch.float32)
    planes = {POSITION: torch.tensor([[position]], dtype=torch.int32)}
    seen = Observation(newest=newest, window=own_window(window, chunked))
    return least_worthy(score, planes, seen, kept or Protection(), count)[0, 0].tolist()


nan, inf = float("nan"), float("inf")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("score", "position", "count", "options", "expected"),
    [
        ([3, 1, 2], [7, 8, 9], 1, {}, [1]),
        ([3, 1, 2], [7, 8, 9], 2, {}, [1, 2]),
        ([1, 1, 1], [9, 7, 8], 2, {}, [1, 2]),  # the oldest among equals
        ([1 + 2**-23, 1 - 2**-23, 1], [7, 9, 8], 2, {}, [0, 2]),  # which rounding makes differ
        ([8.0002, 8.0, 8.0004], [7, 9, 8], 1, {}, [1]),  # more than rounding
        ([-0.0, 0.0, 0.0], [9, 7, 8], 2, {}, [1, 2]),
        ([inf, 3.4e38, 3.4028235e38], [9, 8, 7], 3, {}, [1, 2, 0]),  # infinity is finite
        ([-inf, nan, -3e38], [9, 8, 7], 2, {}, [1, 0]),
        ([nan, nan, nan], [9, 7, 8], 2, {}, [1, 2]),
        (None, [9, 7, 8], 1, {}, [1]),
        ([0, 5, 0], [3, -1, 2], 1, {}, [1]),  # empty slots first
        ([0, nan, -1], [3, 4, 2], 1, {}, [1]),  # then what is not a number
        ([inf, 2, 3], [1, 9, 8], 1, {"kept": Protection(recent=1)}, [2]),
        ([inf, 2, 3], [1, 9, 8], 2, {"kept": Protection(recent=1)}, [2, 0]),
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, {"kept": Protection(sinks=1)}, [1, 2]),
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, {"kept": Protection(keep_from=1, keep_to=3)}, [0, 3]),
        ([0, 9, 2], [8, 5, 9], 1, {"window": 4}, [1]),  # the next query, at 10, sees 7..10
        ([0, 9, 2], [8, 7, 9], 1, {"window": 4}, [0]),
        ([0, 9, 2], [8, 7, 9], 1, {"window": 4, "chunked": True}, [1]),  # it sees 8..10
        ([0, 9, 2], [8, 7, 9], 2, {"window": 5, "chunked": True}, [1, 0]),  # it sees itself
        ([0, 1], [9, 8], 1, {"kept": Protection(recent=9, sinks=9)}, [1]),  # all are protected
    ],
)
def test_literal(score, position, count, options, expected):
    assert victims(score, position, count, **options) == expected


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_compiled_and_torch_agree(data):
    def number(low, high):
        return data.draw(st.integers(low, high))

    rows, heads, slots = number(1, 3), number(1, 3), number(1, 40)
    generator = torch.Generator().manual_seed(number(0, 10**6))
    position = torch.stack([torch.randperm(60, generator=generator) for _ in range(rows * heads)])
    position = position.view(rows, heads, 60)[:, :, :slots].int()
    position[torch.rand(position.shape, generator=generator) < 0.1] = -1
    score = torch.randint(0, 6, position.shape, generator=generator).float()
    noisy = score * (1 + (torch.rand(position.shape, generator=generator) - 0.5) * 2**-15)
    score = torch.where(score < 4, noisy * data.draw(st.sampled_from([1, -1, 1e38])), score)
    score = score.masked_fill(score == 4, nan).masked_fill(
        score == 5, data.draw(st.sampled_from([inf, -inf]))
    )
    if number(0, 5) == 0:
        score = None
    newest = torch.randint(50, 60, (rows, 1, 1), generator=generator)
    seen = Observation(
        newest=newest if number(0, 1) else 59,
        window=own_window(data.draw(st.none() | st.integers(5, 60)), data.draw(st.booleans())),
    )
    kept = Protection(number(0, 10), number(0, 4), number(0, 20), number(0, 30))
    count, planes = number(1, slots), {POSITION: position}
    expected = lowest(worth(score, planes, seen, kept), position, count)
    assert least_worthy(score, planes, seen, kept, count).equal(expected)


def test_a_score_shared_by_heads_is_that_of_each():
    position = torch.arange(6, dtype=torch.int32).expand(2, 3, 6).contiguous()
    score = torch.rand(2, 1, 6)
    seen = Observation(newest=5)
    found = least_worthy(score, {POSITION: position}, seen, Protection(), 2)
    assert found.equal(score.argsort(dim=2)[:, :, :2].expand(-1, 3, -1))


def test_worths_are_rounded_in_float32_where_a_model_computes_in_float64(monkeypatch):
    score = torch.rand(1, 2, 5, dtype=torch.float64)
    expected = ranking.rounded(score)
    # As in a comparison of gradients: `float()` of a model's code gives float64.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    assert ranking.rounded(score).equal(expected)
