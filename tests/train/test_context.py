"""Processes that share a text find the loss and the gradients that one process finds."""

from __future__ import annotations

import pytest
import torch
from support import shared_text
from support.autograd_gradients import error
from support.shared_text import CASES

QUICK = [case for case in CASES if case not in ("exact", "reach", "the last layer", "accumulated")]


@pytest.mark.parametrize(
    ("processes", "cases"), [(2, QUICK), pytest.param(4, CASES, marks=pytest.mark.slow)]
)
def test_processes_that_share_a_text_find_the_gradients_of_one(processes, cases, tmp_path):
    found = shared_text.run(processes, str(tmp_path), cases)
    alone = {case: shared_text.found(case, None) for case in cases}
    for results, _, _ in found:
        assert results.keys() == alone.keys()
        for case, (value, gradient) in results.items():
            expected, of_one = alone[case]
            torch.testing.assert_close(value, expected.double(), rtol=1e-12, atol=0, msg=case)
            assert error(gradient, of_one) < 1e-12, case
    assert [raised for _, raised, _ in found] == ["PeerError"] * (processes - 1) + ["LossError"]
    starts, most = shared_text.kept(None)
    assert [start for _, _, (seen, _) in found for start in seen] == starts
    assert all(0 < size < most for _, _, (_, size) in found)
