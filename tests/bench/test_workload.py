"""Prompts that arrive over time, and the figures of what was served."""

from __future__ import annotations

import pytest
import torch
from kvkeep_lab.bench.options import Serve
from kvkeep_lab.bench.workload import (
    Request,
    Served,
    agreement,
    figures,
    lengths,
    poisson,
    prompts,
    quantile,
    serve,
)

from kvkeep.errors import KVKeepError


@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_lengths_have_one_mean_and_lie_within(count):
    found = lengths(count)
    assert sum(found) == round(687.5 * count)
    assert all(200 <= x <= 1400 for x in found)


def test_prompts_follow_each_other_behind_what_they_share():
    first, second = prompts(None, 50, [3, 4], shared=2)
    whole = torch.randint(50, (9,), generator=torch.Generator().manual_seed(0))
    assert first.equal(whole[:5])
    assert second.equal(torch.cat([whole[:2], whole[5:]]))


def test_arrivals_are_ordered_and_repeat():
    ids = [torch.tensor([i]) for i in range(200)]
    found = [request.at for request in poisson(ids, 4.0)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] / 199 == pytest.approx(0.25, rel=0.3)
    assert found == [request.at for request in poisson(ids, 4.0)]


def test_figures():
    requests = [Request(torch.tensor([1])), Request(torch.tensor([2]), 1.0)]
    served = Served(requests, [[2.0, 3.0, 5.0], [4.0, 5.0, 6.0]], bytes=7)
    assert figures(served) == {
        "tokens_per_s": 1.0,
        "decode_tokens_per_s": 2.0,  # between the seconds 4 and 5
        "ttft_p50_s": 2.0,
        "ttft_p95_s": 3.0,
        "gap_p95_s": 2.0,
        "gap_max_s": 2.0,
        "bytes": 7,
    }
    assert quantile([4, 1, 3, 2], 0.5) == 2


@pytest.mark.parametrize(
    ("second", "rate"),
    [
        ([5.0, 6.0, 7.0], 4 / 5),  # after the first: 2 tokens in 3 seconds, and 2 in 2
        ([4.0, 5.0, 7.0], None),  # no token of the first comes while the second decodes
        ([4.0, 4.0, 4.0], None),
    ],
)
def test_decoding_one_after_the_other(second, rate):
    requests = [Request(torch.tensor([1]))] * 3
    times = [[2.0, 3.0, 5.0], second, [4.5] * 3 if rate is None else [8.0] * 3]
    assert figures(Served(requests, times))["decode_tokens_per_s"] == rate


def test_agreement_ends_with_the_first_token_that_differs():
    requests = [Request(torch.tensor([1]))] * 2
    times = [[1.0, 2.0, 3.0, 4.0]] * 2
    one = Served(requests, times, [[1, 2, 3, 4], [5, 6, 7, 8]])
    other = Served(requests, times, [[1, 9, 3, 4], [5, 6, 7, 8]])
    assert agreement(one, other) == pytest.approx((0.25 + 1) / 2)
    assert agreement(one, Served(requests, times)) is None


class Echo:
    """A session that answers each prompt with its first token, one a step."""

    def __init__(self, short=0):
        self.left, self.short = {}, short

    def add(self, index, ids, new):
        self.left[index] = [int(ids[0])] * (new - self.short)

    def step(self):
        found = [(index, tokens.pop()) for index, tokens in self.left.items()]
        self.left = {index: tokens for index, tokens in self.left.items() if tokens}
        return found

    @property
    def busy(self):
        return bool(self.left)

    def held(self):
        return 10 * len(self.left)


def test_all_are_served_and_incomplete_answers_are_refused():
    requests = [Request(torch.tensor([3])), Request(torch.tensor([4]), 0.01)]
    served = serve(Echo(), requests, 3)
    assert served.tokens == [[3] * 3, [4] * 3]
    assert served.times[1][0] >= 0.01
    with pytest.raises(KVKeepError, match="cannot be compared"):
        serve(Echo(short=1), requests, 3)


def test_models_of_one_kind_of_layers_are_measured_briefly():
    asked = Serve("random-latent", sequences=(4,))
    assert (asked.sequences, asked.longest, asked.new_tokens) == ((4,), 160, 128)
    assert asked.against == ("kvkeep alone",)
    assert Serve("random-latent", cpu_time=True).against is None
    asked = Serve()
    assert (asked.sequences, asked.longest, asked.new_tokens) == ((1, 4, 16, 64), 1400, 64)
    assert asked.against is None
