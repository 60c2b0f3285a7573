"""Made-up people: their names, and facts about them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
"""Names of people, cities, jobs and things, and forms of requests and of questions."""

CITIES: list[str] = WORDS["cities"]
JOBS: list[str] = WORDS["jobs"]
SUBJECTS: list[str] = WORDS["subjects"]
THINGS: list[str] = WORDS["things"]
_INITIALS = "ABCDEFGHIJKLMNOPRSTVW"
_SHORTEST = 20  # tokens of a paragraph, at least


@dataclass(frozen=True)
class Life:
    """Facts about a person."""

    name: str
    born: str
    year: int
    subject: str
    home: str
    job: str
    things: str

    @property
    def paragraph(self) -> str:
        """It as two sentences."""
        first = self.name.split()[0]
        return (
            f"{self.name} was born in {self.born} in {self.year}. After a degree in "
            f"{self.subject}, {first} moved to {self.home}, works there as a {self.job}, and is "
            f"known for a collection of old {self.things}."
        )


def life(name: str, draw: random.Random) -> Life:
    """Draw facts about a person."""
    born, home = draw.sample(CITIES, 2)
    subject, job, things = (draw.choice(x) for x in (SUBJECTS, JOBS, THINGS))
    return Life(name, born, 1900 + draw.randrange(90), subject, home, job, things)


def lives(draw: random.Random, length: int) -> list[Life]:
    """People of different names, more than fit `length` tokens, or all there are."""
    names = _names()
    some = draw.sample(names, min(len(names), 20 + length // _SHORTEST))
    return [life(name, draw) for name in some]


@cache
def _names() -> tuple[str, ...]:
    """First names, initials and last names."""
    every = product(WORDS["first_names"], _INITIALS, WORDS["last_names"])
    return tuple(f"{a} {b}. {c}" for a, b, c in every)
