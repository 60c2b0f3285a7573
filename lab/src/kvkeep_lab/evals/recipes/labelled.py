"""Examples of labels: short texts, made by filling forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from kvkeep_lab.evals.recipes.people import CITIES, JOBS, SUBJECTS, THINGS, WORDS

Example = tuple[str, str]
"""A text and its label."""

_FILLINGS = {
    "name": WORDS["first_names"],
    "city": CITIES,
    "subject": SUBJECTS,
    "job": JOBS,
    "things": THINGS,
    "year": tuple(map(str, range(1900, 1990))),
    "amount": tuple(map(str, range(20, 980, 30))),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
}


def examples(
    forms: Mapping[str, Sequence[str]], draw: random.Random
) -> tuple[Callable[[int], list[Example]], Example]:
    """Examples to learn from, and one more to ask about.

    The first examples, as many as there are labels, have one of each label, and one of them has
    the form of the question. With more, each form comes equally often. The question is no example.

    Args:
        forms: of texts, for each label, with the names of their parts in braces.

    Returns:
        A function that gives this many examples, in a mixed order, and the one to ask about.
    """
    seed = draw.random()
    first = {label: draw.choice(some) for label, some in forms.items()}
    label = draw.choice(list(forms))
    asked = _filled(first[label], draw), label
    rest = [(form, of) for of, some in forms.items() for form in some if form != first[of]]
    draw.shuffle(rest)
    cycle = [(form, of) for of, form in first.items()] + rest

    def shown(count: int) -> list[Example]:
        filling, found = random.Random(seed), list[Example]()
        while len(found) < count:
            form, of = cycle[len(found) % len(cycle)]
            text = _filled(form, filling)
            if text != asked[0]:
                found.append((text, of))
        filling.shuffle(found)
        return found

    return shown, asked


def _filled(form: str, draw: random.Random) -> str:
    return form.format(**{name: draw.choice(values) for name, values in _FILLINGS.items()})
