"""Measures of answers are held to values that were computed by hand."""

from __future__ import annotations

import math

import pytest
from kvkeep_lab.evals.metrics import CITATIONS, CODE, CONTAINED, F1, NUMBER, label_of, ndcg


@pytest.mark.parametrize(
    ("metric", "text", "answers", "score"),
    [
        (CONTAINED, "So:\n12,345 and lisbon.", ["12345", "Lisbon", "Oslo"], 2 / 3),
        (NUMBER, " 7.", ["7"], 1),
        (NUMBER, "17", ["7"], 0),
        (NUMBER, "7, 8 or 9\n7", ["7"], 1 / 3),
        (NUMBER, "none", ["7"], 0),
        (F1, " The city of Oslo!", ["Oslo"], 1 / 2),  # 1 of 3 words, 1 of 1
        (F1, "red red coins", ["red coins", "x"], 4 / 5),  # 2 of 3, 2 of 2
        (F1, "", ["Oslo"], 0),
        (F1, "\n\nan Oslo\nor Lima", ["oslo"], 1),
        (CODE, "    return x\nelse", ["        return x"], 1),
        (CODE, "```python\n# so\nabcd", ["bcde"], 6 / 8),  # three of four and four
        (CODE, "```", ["x = 1"], 0),
        (label_of(["person", "place"]), " Place, I think", ["place"], 1),
        (label_of(["person", "place"]), "person or place", ["place"], 1 / 2),
        (label_of(["person", "place"]), "places\nplace", ["place"], 0),
        (CITATIONS, "Ada B [3], and Bo C [12].", ["Ada B [3]", "Bo C [12]"], 1),
        (CITATIONS, "Ada B [3] and Bo C[12][4]", ["Ada B [3]", "Bo C [12]"], 4 / 5),
        (CITATIONS, "Ada B, Bo C [3]", ["Ada B [3]", "Bo C [12]"], 0),
        (CITATIONS, "Ada B [3], Ada B [3], Eve D", ["Ada B [3]", "Bo C [12]"], 2 / 4),
        (CITATIONS, "", ["Ada B [3]"], 0),
    ],
)
def test_scores(metric, text, answers, score):
    assert metric.score(text, answers) == pytest.approx(score)


def test_a_ranking_counts_grades_by_their_ranks():
    graded = ndcg([3, 2, 1])
    best = 3 + 2 / math.log2(3) + 1 / 2
    for text, gain in (
        (" 5 > 9 > 4", best),
        ("9 > 5 > 4", 2 + 3 / math.log2(3) + 1 / 2),
        ("1 > 1 > 5", 3 / math.log2(3)),  # what comes again has no rank of its own
        (" > ".join(map(str, range(10, 20))) + " > 5", 0),  # the eleventh
        ("none", 0),
    ):
        assert graded.score(text, ["5", "9", "4"]) == pytest.approx(gain / best)


@pytest.mark.parametrize(
    ("metric", "text", "settled"),
    [
        (CONTAINED, "Oslo", True),
        (CONTAINED, "Os\nlo\n", False),
        (F1, "Oslo", False),  # more words would lower it
        (F1, "\n \nOslo", False),
        (F1, "\nLima\n", True),
        (CODE, "```\n# x\n", False),
        (CODE, "```\n# x\ny = 1\n", True),
    ],
)
def test_an_answer_is_settled_when_no_more_text_counts(metric, text, settled):
    assert metric.settled(text, ["Oslo"]) == settled
