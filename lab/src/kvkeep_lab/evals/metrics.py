"""How right the text of an answer is, from 0 to 1, by the benchmarks' own measures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_RANKS = 10
_ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class Metric:
    """A measure of answers.

    Args:
        name: for reports.
        measure: the score of a text, given the answers that are expected.
        counts: whether a line counts. The first one that does is scored, so that a model which
            goes on with other things loses nothing; by default the first that has a word or number.
            None: the whole text is scored, and more text never lowers the score.
    """

    name: str
    measure: Callable[[str, Sequence[str]], float]
    counts: Callable[[str], object] | None = re.compile(r"\w").search

    def score(self, text: str, answers: Sequence[str]) -> float:
        """The score of an answer's text."""
        return self.measure(self._scored(text)[0], answers)

    def settled(self, text: str, answers: Sequence[str]) -> bool:
        """Whether the score stays the same however the text goes on."""
        if self.counts is None:
            return self.score(text, answers) == 1
        return self._scored(text)[1]

    def _scored(self, text: str) -> tuple[str, bool]:
        """The part of a text that is scored, and whether it is complete."""
        if self.counts is None:
            return text, False
        for line in text.splitlines(keepends=True):
            if self.counts(line):
                return line.strip(), line.endswith("\n")
        return "", False


def share_contained(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that are in the text, as RULER and HELMET count it: in capital
    letters or not, and numbers with commas or without."""
    text = text.lower()
    text += text.replace(",", "")
    return sum(wanted.lower() in text for wanted in answers) / len(answers)


def share_of_numbers(text: str, answers: Sequence[str]) -> float:
    """The share of the numbers in the text that are the answer, as LongBench counts it."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(answers[0]) / len(numbers) if numbers else 0.0


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The harmonic mean of the share of the text's words that are in an answer, and of the answer's
    in the text; of the best answer. Case, punctuation and articles do not count (SQuAD, LongBench).
    """
    return max(_f1(_words(text), _words(answer)) for answer in answers)


def edit_similarity(text: str, answers: Sequence[str]) -> float:
    """Twice the number of characters in common blocks, divided by all characters: the ratio of
    `difflib`, which is LongBench's measure of code. Indentation does not count."""
    return SequenceMatcher(None, text, answers[0].strip(), autojunk=False).ratio()


def citation_f1(text: str, answers: Sequence[str]) -> float:
    """The harmonic mean of the shares of right pairs of an item and a passage that it cites, among
    those in the text and among those of the answers, which are written as *name [7]*.

    An item ends with its citations, a comma or a semicolon. A pair is right if the item has the
    name of an answer and cites its passage; an item without citations counts as one wrong pair.
    """
    wanted = {pair for answer in answers for pair in _cited(answer)}
    said = list(dict.fromkeys(_cited(text)))
    right = {
        (name, passage)
        for name, passage in wanted
        if any(name in item and passage == cited for item, cited in said)
    }
    return 2 * len(right) / (len(said) + len(wanted))


def _gain(grades: Sequence[int]) -> float:
    best = grades[:_RANKS]
    return sum(grade / math.log2(rank + 1) for rank, grade in enumerate(best, 1))


def _cited(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item, citations in re.findall(r"([^,;\[\]]*\w[^,;\[\]]*)((?:\[\d+\]\s*)*)", text):
        passages = re.findall(r"\d+", citations) or [""]
        pairs += [(item.strip(), passage) for passage in passages]
    return pairs


def _words(text: str) -> list[str]:
    plain = re.sub(r"[^\w\s]", "", text.lower())
    return [word for word in plain.split() if word not in _ARTICLES]


def _f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


CONTAINED = Metric("contained", share_contained, counts=None)
NUMBER = Metric("accuracy", share_of_numbers)
F1 = Metric("F1", word_f1)
CITATIONS = Metric("citation F1", citation_f1)
CODE = Metric(  # not a fence of Markdown, nor a comment
    "edit similarity", edit_similarity, counts=lambda line: re.match(r"\s*[^\s`#]", line)
)


def label_of(labels: Sequence[str]) -> Metric:
    """The answer is one of these words. The score is 1 divided by the number of them that are
    named, if the right one is among them, as LongBench counts it."""

    def measure(text: str, answers: Sequence[str]) -> float:
        found = {label for label in labels if re.search(rf"\b{label}\b", text, re.IGNORECASE)}
        return 1 / len(found) if answers[0] in found else 0.0

    return Metric("accuracy", measure)


def ndcg(grades: Sequence[int]) -> Metric:
    """The answer is a ranking of passages by their numbers, and the expected answers are the
    numbers of the relevant passages, the most relevant first.

    The normalised discounted cumulative gain of the first ten (K. Järvelin and J. Kekäläinen, ACM
    Trans. Inf. Syst. 20, 2002): each passage counts by its grade, divided by log2(rank + 1), and
    the sum is divided by that of the best ranking. A number that comes again is left out.

    Args:
        grades: how relevant the expected answers are; other passages have grade 0.
    """

    def measure(text: str, answers: Sequence[str]) -> float:
        grade = dict(zip(answers, grades, strict=True))
        ranked = list(dict.fromkeys(re.findall(r"\d+", text)))
        return _gain([grade.get(one, 0) for one in ranked]) / _gain(grades)

    return Metric(f"NDCG@{_RANKS}", measure)
