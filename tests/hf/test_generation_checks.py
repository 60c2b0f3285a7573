"""docs/transformers.md: which families pass what transformers' tests of generation ask."""

from __future__ import annotations

import pytest
from support.generation_checks import difference, in_page, outcomes, table
from support.tiny_models import FAMILIES


@pytest.mark.slow
def test_the_page_has_what_the_checks_find():
    assert table({family: outcomes(family) for family in FAMILIES}) == in_page()


def test_a_difference_is_found():
    assert difference({"cache": [2, (1, 7)]}, {"cache": [2, (1, 4)]}) == (
        "cache: [2, (1, 4)] instead of [2, (1, 7)]"
    )
    assert not difference({"cache": [2]}, {"cache": [2]})
