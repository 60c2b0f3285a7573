"""What specs have in common."""

from __future__ import annotations

import pytest
from kvkeep_lab.evals.tradeoff import family, figure, series, short


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("h2o:1000", "h2o:*"),
        ("kvzip:25%+int8/int4", "kvzip:*+int8/int4"),
        ("window:1000,sinks=4@growing:2", "window:*,sinks=4@growing:2"),
        ("pyramid:20(h2o:1000,recent=5)", "pyramid:20(h2o:*,recent=5)"),
        ("keep_all+int4:32", "keep_all+int4:32"),
    ],
)
def test_a_family_has_any_budget(spec, name):
    assert family(spec) == name


def test_a_figure_that_was_not_measured_is_none():
    row = {"tokens_per_s": None, "kl": 0.5, "kl_95": [0.4, 0.7], "bytes": 9}
    assert figure(row, "tokens_per_s") is None  # of one token
    assert figure(row, "perplexity") is None
    assert figure(row, "accuracy") is None
    assert figure(row, "kl") == (0.5, 0.4, 0.7)
    assert figure(row, "bytes") == (9, 9, 9)


@pytest.mark.parametrize(
    ("spec", "of", "name"),
    [("kvpress knorm", ", kvpress", "knorm"), ("llama.cpp q4_0", ", llama.cpp", "q4_0"),
     ("keep_all", "", "keep_all")],
)  # fmt: skip
def test_a_row_of_another_library_is_a_series_of_its_own(spec, of, name):
    assert series({"spec": spec, "context": 1000}) == "1,000 tokens" + of
    assert short(spec) == name
