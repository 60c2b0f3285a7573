"""Made-up people: their names, and facts about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dublin", "Athens")
SUBJECTS = ("botany", "chemistry", "geology", "history", "law", "medicine", "music", "physics")
JOBS = ("baker", "carpenter", "diver", "editor", "farmer", "gardener", "nurse", "pilot")
THINGS = ("clocks", "coins", "fossils", "kites", "maps", "masks", "shells", "stamps")
# fmt: off
FIRST_NAMES = (
    "Ada", "Boris", "Clara", "Dario", "Elsa", "Felix", "Greta", "Hugo", "Irma", "Jonas",
    "Klara", "Leon", "Mina", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tilda", "Viktor",
)
LAST_NAMES = (
    "Abel", "Brandt", "Castro", "Dahl", "Ekman", "Fuchs", "Garcia", "Holm", "Ivanov",
    "Jansen", "Keller", "Lund", "Moreau", "Novak", "Olsen", "Petrov", "Quist", "Rossi",
    "Silva", "Toth", "Ueda", "Varga", "Weiss", "Yilmaz", "Zeman",
)
# fmt: on
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
    names = _long_names()
    return [
        life(name, draw) for name in draw.sample(names, min(len(names), 20 + length // _SHORTEST))
    ]


def short_names() -> list[str]:
    """First and last names."""
    return [f"{first} {last}" for first, last in product(FIRST_NAMES, LAST_NAMES)]


@cache
def _long_names() -> tuple[str, ...]:
    """First names, initials and last names."""
    return tuple(f"{a} {b}. {c}" for a, b, c in product(FIRST_NAMES, _INITIALS, LAST_NAMES))
