"""Tasks of the kinds of RULER (arXiv 2404.06654): does a model still find, follow and count what a
prompt says?"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pydoc_data import topics

from torch import Tensor

from kvkeep_lab.evals.prompts import Frame, Prompt, Question, Task, placed
from kvkeep_lab.evals.recipes.people import CITIES, Life, lives

_NEEDLES = 4  # sentences hidden in a prompt with several
_HOPS = 4
_COMMON, _TIMES = 10, 10
_ZETA = 2.0


def needles(frame: Frame, text: Tensor, depths: Sequence[int], draw: random.Random) -> list[Prompt]:
    """One prompt for each depth, with one number hidden there."""
    cities = draw.sample(CITIES, min(len(depths), len(CITIES)))
    found = []
    for city, depth in zip(cycle(cities), depths, strict=False):
        number = _number(draw)
        asked = _asked(f"secret number of {city}", (number,))
        found.append(frame.hiding(text, [(depth, _sentence(city, number))], asked, depth))
    return found


def _multi_key(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Several numbers of several names, of which one is asked."""
    hidden, cities, numbers = _several(draw)
    which = draw.randrange(_NEEDLES)
    asked = _asked(f"secret number of {cities[which]}", (numbers[which],))
    return frame.hiding(text, hidden, asked, hidden[which][0])


def _multi_query(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Several numbers of several names, all of which are asked."""
    hidden, cities, numbers = _several(draw)
    names = f"{', '.join(cities[:-1])} and {cities[-1]}"
    return frame.hiding(text, hidden, _asked(f"secret numbers of {names}", numbers), depth)


def _multi_value(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Several numbers of one name, all of which are asked."""
    city, numbers = draw.choice(CITIES), _numbers(draw)
    told = [f"\nOne of the secret numbers of {city} is {number}.\n" for number in numbers]
    asked = _asked(f"{_NEEDLES} secret numbers of {city}", numbers)
    return frame.hiding(text, _spread(draw, told), asked, depth)


def _variables(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A chain of assignments: which variables have the value of the first?"""
    number, names = _number(draw), list[str]()
    while len(names) <= _HOPS:
        name = "".join(draw.choices("BCDFGHJKLMNPQRSTVWXZ", k=5))
        names += [name] if name not in names else []
    values = [number, *(f"VAR {name}" for name in names)]
    told = [f"\nVAR {name} = {value}\n" for name, value in zip(names, values, strict=False)]
    asked = Question(
        f"Find all variables that have the value {number}, by following the assignments.",
        f"The {len(names)} variables that have the value {number} are",
        tuple(names),
    )
    return frame.hiding(text, _spread(draw, told), asked, depth)


def _common_words(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A numbered list of words: which ten come ten times as often as the other words?"""
    words = list(_six_letters())
    draw.shuffle(words)
    common, rare, seed = words[:_COMMON], words[_COMMON:], draw.random()
    often = _COMMON * _TIMES  # entries of common words, for each repetition of the other words

    def listed(count: int) -> tuple[str, Question]:
        repeated = max(1, min(3, count // (often + 20)), count // (often + len(rare)))
        others = rare[: count // repeated - often]
        entries = (common * _TIMES + others) * repeated
        random.Random(seed).shuffle(entries)
        return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1)), asked

    asked = Question(
        f"What are the {_COMMON} words that come most often in the list?",
        f"The {_COMMON} words that come most often are",
        tuple(common),
    )
    return frame.filled(listed, often + 10, 100_000, depth)


def _frequent_words(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Made-up words, with frequencies of a zeta distribution: which three come most often? The
    first is written as dots and does not count."""
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(1000)]
    words = ["...", *dict.fromkeys(words)]
    shares = [rank**-_ZETA for rank in range(1, len(words) + 1)]
    whole, seed = sum(shares), draw.random()

    def coded(count: int) -> tuple[str, Question]:
        entries = list[str]()
        for word, share in zip(words, shares, strict=True):
            entries += [word] * round(count * share / whole)
        random.Random(seed).shuffle(entries)
        return " ".join(entries), asked

    asked = Question(
        "Which three coded words come most often in the text? Leave the dots out.",
        "The three words that come most often are",
        tuple(words[1:4]),
    )
    return frame.filled(coded, 60, 100_000, depth)


def _qa(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A paragraph about a person among paragraphs about others, and a question about it."""
    one, *people = lives(draw, frame.length)
    others = [other.paragraph for other in people]
    asked = draw.choice(_questions(one))

    def told(count: int) -> tuple[str, Question]:
        return "\n".join(placed(one.paragraph, others[: count - 1], depth)[0]), asked

    return frame.filled(told, 2, 1 + len(others), depth)


def _questions(one: Life) -> list[Question]:
    name = one.name
    return [
        Question(f"In which city was {name} born?", f"{name} was born in", (one.born,)),
        Question(f"In which city does {name} work?", f"{name} works in", (one.home,)),
        Question(f"What did {name} study?", f"{name} studied", (one.subject,)),
        Question(f"What is the job of {name}?", f"The job of {name} is", (one.job,)),
        Question(f"What does {name} collect?", f"{name} collects", (one.things,)),
    ]


def _several(draw: random.Random) -> tuple[list[tuple[int, str]], list[str], list[str]]:
    """Sentences to hide, and their names and numbers."""
    cities, numbers = draw.sample(CITIES, _NEEDLES), _numbers(draw)
    return _spread(draw, list(map(_sentence, cities, numbers))), cities, numbers


def _sentence(city: str, number: str) -> str:
    """A sentence to hide."""
    return f"\nThe secret number of {city} is {number}.\n"


def _asked(what: str, numbers: Sequence[str]) -> Question:
    """The question for hidden numbers, all of which are the answer."""
    verb = "is" if len(numbers) == 1 else "are"
    return Question(f"What {verb} the {what}?", f"The {what} {verb}", tuple(numbers))


def _spread(draw: random.Random, told: Sequence[str]) -> list[tuple[int, str]]:
    """Sentences in their order, each with a depth in percent."""
    return list(zip(sorted(draw.sample(range(5, 95), len(told))), told, strict=True))


def _number(draw: random.Random) -> str:
    return str(draw.randint(10000, 99999))


def _numbers(draw: random.Random) -> list[str]:
    return [str(number) for number in draw.sample(range(10000, 100000), _NEEDLES)]


@cache
def _six_letters() -> tuple[str, ...]:
    """Words of one length, so that none contains another."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{6}\b", " ".join(topics.topics.values())))))


TASKS = {
    "needle": Task(None, 12),
    "multi-key": Task(_multi_key, 12),
    "multi-value": Task(_multi_value, 48),
    "multi-query": Task(_multi_query, 48),
    "variables": Task(_variables, 64),
    "common-words": Task(_common_words, 64),
    "frequent-words": Task(_frequent_words, 32),
    "qa": Task(_qa, 16),
}
"""RULER's kinds by name."""
