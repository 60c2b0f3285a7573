"""Tasks on a long prompt, of the kinds of RULER (arXiv 2404.06654): does a model still find, follow
and count what a prompt says? All texts are made here."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pydoc_data import topics
from typing import Any

from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.evals.prompts import Asked, Frame, Prompt

SAMPLES = 5
"""Prompts of a task, for each window of text."""

_Make = Callable[[Frame, Tensor, random.Random, int], Prompt]

_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dublin", "Athens")
# fmt: off
_FIRST = (
    "Ada", "Boris", "Clara", "Dario", "Elsa", "Felix", "Greta", "Hugo", "Irma", "Jonas",
    "Klara", "Leon", "Mina", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tilda", "Viktor",
)
_LAST = (
    "Abel", "Brandt", "Castro", "Dahl", "Ekman", "Fuchs", "Garcia", "Holm", "Ivanov",
    "Jansen", "Keller", "Lund", "Moreau", "Novak", "Olsen", "Petrov", "Quist", "Rossi",
    "Silva", "Toth", "Ueda", "Varga", "Weiss", "Yilmaz", "Zeman",
)
_SUBJECTS = ("botany", "chemistry", "geology", "history", "law", "medicine", "music", "physics")
_JOBS = ("baker", "carpenter", "diver", "editor", "farmer", "gardener", "nurse", "pilot")
_THINGS = ("clocks", "coins", "fossils", "kites", "maps", "masks", "shells", "stamps")
# fmt: on
_NEEDLES = 4  # sentences hidden in a prompt with several
_HOPS = 4
_COMMON, _TIMES = 10, 10
_ZETA = 2.0


def prompts(
    task: str, tokenizer: Any, text: Tensor, length: int, samples: int = SAMPLES, seed: int = 0
) -> list[Prompt]:
    """A task's prompts, formatted as a chat if the tokenizer has a chat template.

    Args:
        text: token ids (n,) of a window of text, at least `length`, in which sentences are hidden.
        length: tokens of a prompt; `common-words`, `frequent-words` and `qa` take at most so many.
        seed: determines numbers, names and words.

    Raises:
        SpecError: the task does not exist.
        ShapeError: the length leaves no room for it.
    """
    require([task])
    kind = TASKS[task]
    frame = Frame(tokenizer, length, kind.steps, task)
    depths = [10 + round(80 * i / (samples - 1)) if samples > 1 else 50 for i in range(samples)]
    if kind.make is None:
        return _needles(frame, text, depths, random.Random(seed))
    draws = (random.Random(f"{task} {seed} {index}") for index in range(samples))
    return [kind.make(frame, text, draw, at) for draw, at in zip(draws, depths, strict=True)]


def require(tasks: Sequence[str]) -> None:
    """Check that tasks exist.

    Raises:
        SpecError: one does not.
    """
    for task in tasks:
        if task not in TASKS:
            raise SpecError(f"no task {task!r}; there is {', '.join(TASKS)}")


def cost(task: str, length: int, step: int, samples: int) -> int:
    """The highest cost of all prompts of a task, where a step costs as much as `step` tokens."""
    return samples * (length + TASKS[task].steps * step)


def _needles(
    frame: Frame, text: Tensor, depths: Sequence[int], draw: random.Random
) -> list[Prompt]:
    """One prompt for each depth, with one number hidden there."""
    cities = draw.sample(_CITIES, min(len(depths), len(_CITIES)))
    found = []
    for index, depth in enumerate(depths):
        city, number = cities[index % len(cities)], _number(draw)
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
    asked = _asked(f"secret numbers of {names}", numbers)
    return frame.hiding(text, hidden, asked, depth)


def _multi_value(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Several numbers of one name, all of which are asked."""
    city = draw.choice(_CITIES)
    numbers = _numbers(draw, _NEEDLES)
    hidden = [
        (place, f"\nOne of the secret numbers of {city} is {number}.\n")
        for place, number in zip(_places(draw, _NEEDLES), numbers, strict=True)
    ]
    asked = _asked(f"{_NEEDLES} secret numbers of {city}", numbers)
    return frame.hiding(text, hidden, asked, depth)


def _variables(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A chain of assignments: which variables have the value of the first?"""
    number, names = _number(draw), list[str]()
    while len(names) <= _HOPS:
        name = "".join(draw.choices("BCDFGHJKLMNPQRSTVWXZ", k=5))
        names += [name] if name not in names else []
    values = [number, *(f"VAR {name}" for name in names)]
    hidden = [
        (place, f"\nVAR {name} = {value}\n")
        for place, name, value in zip(_places(draw, len(names)), names, values[:-1], strict=True)
    ]
    asked = Asked(
        f"Find all variables that have the value {number}, by following the assignments.",
        f"The {len(names)} variables that have the value {number} are",
        tuple(names),
    )
    return frame.hiding(text, hidden, asked, depth)


def _common_words(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A numbered list of words: which ten come ten times as often as the others?"""
    words = _words()
    draw.shuffle(words)
    common, rare, seed = words[:_COMMON], words[_COMMON:], draw.random()
    often = _COMMON * _TIMES  # entries of common words, for each repetition of the others

    def listed(count: int) -> str:
        repeated = max(1, min(3, count // (often + 20)), count // (often + len(rare)))
        others = rare[: count // repeated - often]
        entries = (common * _TIMES + others) * repeated
        random.Random(seed).shuffle(entries)
        return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))

    asked = Asked(
        f"What are the {_COMMON} words that come most often in the list?",
        f"The {_COMMON} words that come most often are",
        tuple(common),
    )
    return frame.filled(listed, often + 10, 100_000, asked, depth)


def _frequent_words(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Made-up words, with frequencies of a zeta distribution: which three come most often? The
    first is written as dots and does not count."""
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(1000)]
    words = ["...", *dict.fromkeys(words)]
    shares = [rank**-_ZETA for rank in range(1, len(words) + 1)]
    whole, seed = sum(shares), draw.random()

    def coded(count: int) -> str:
        entries = [
            word
            for word, share in zip(words, shares, strict=True)
            for _ in range(round(count * share / whole))
        ]
        random.Random(seed).shuffle(entries)
        return " ".join(entries)

    asked = Asked(
        "Which three coded words come most often in the text? Leave the dots out.",
        "The three words that come most often are",
        tuple(words[1:4]),
    )
    return frame.filled(coded, 60, 100_000, asked, depth)


def _qa(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A paragraph about a person among paragraphs about others, and a question about it."""
    people = [f"{first} {last}" for first, last in product(_FIRST, _LAST)]
    draw.shuffle(people)
    person, seed = people[0], draw.random()
    paragraph, born, home, subject, job, things = _life(person, draw)
    question, start, answer = draw.choice(
        (
            (f"In which city was {person} born?", f"{person} was born in", born),
            (f"In which city does {person} work?", f"{person} works in", home),
            (f"What did {person} study?", f"{person} studied", subject),
            (f"What is the job of {person}?", f"The job of {person} is", job),
            (f"What does {person} collect?", f"{person} collects", things),
        )
    )

    def told(count: int) -> str:
        other = random.Random(seed)
        paragraphs = [_life(name, other)[0] for name in people[1:count]]
        paragraphs.insert(len(paragraphs) * depth // 100, paragraph)
        return "\n".join(paragraphs)

    return frame.filled(told, 2, len(people), Asked(question, start, (answer,)), depth)


def _life(person: str, draw: random.Random) -> tuple[str, str, str, str, str, str]:
    """A paragraph about a person, and the two cities, subject, job and things in it."""
    born, home = draw.sample(_CITIES, 2)
    subject, job, things = (draw.choice(x) for x in (_SUBJECTS, _JOBS, _THINGS))
    first, year = person.split()[0], 1900 + draw.randrange(90)
    paragraph = (
        f"{person} was born in {born} in {year}. After a degree in {subject}, {first} moved to "
        f"{home}, works there as a {job}, and is known for a collection of old {things}."
    )
    return paragraph, born, home, subject, job, things


def _several(draw: random.Random) -> tuple[list[tuple[int, str]], list[str], list[str]]:
    """Sentences to hide, and their names and numbers."""
    cities, numbers = draw.sample(_CITIES, _NEEDLES), _numbers(draw, _NEEDLES)
    places = _places(draw, _NEEDLES)
    hidden = [
        (place, _sentence(city, number))
        for place, city, number in zip(places, cities, numbers, strict=True)
    ]
    return hidden, cities, numbers


def _sentence(city: str, number: str) -> str:
    """A sentence to hide."""
    return f"\nThe secret number of {city} is {number}.\n"


def _asked(what: str, numbers: Sequence[str]) -> Asked:
    """The question for hidden numbers, all of which are the answer."""
    verb = "is" if len(numbers) == 1 else "are"
    return Asked(f"What {verb} the {what}?", f"The {what} {verb}", tuple(numbers))


def _places(draw: random.Random, count: int) -> list[int]:
    return sorted(draw.sample(range(5, 95), count))


def _number(draw: random.Random) -> str:
    return str(draw.randint(10000, 99999))


def _numbers(draw: random.Random, count: int) -> list[str]:
    return [str(number) for number in draw.sample(range(10000, 100000), count)]


def _words() -> list[str]:
    """Words of one length, so that none contains another."""
    return list(_six_letters())


@cache
def _six_letters() -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"\b[a-z]{6}\b", " ".join(topics.topics.values())))))


@dataclass(frozen=True)
class Task:
    """How a task's prompts are made, and most tokens of an answer. `make`: of one prompt; None: the
    prompts of `needle`, whose names differ, are made together."""

    make: _Make | None
    steps: int


TASKS = {
    "needle": Task(None, 12),
    "multi-key": Task(_multi_key, 12),
    "multi-value": Task(_multi_value, 48),
    "multi-query": Task(_multi_query, 48),
    "variables": Task(_variables, 32),
    "common-words": Task(_common_words, 64),
    "frequent-words": Task(_frequent_words, 32),
    "qa": Task(_qa, 16),
}
"""Every task by its name."""
