"""Tasks of the kinds of LongBench (arXiv 2308.14508): which passage is meant, how many there are,
what follows from two of them, to which type a question belongs, how code goes on."""

from __future__ import annotations

import random
from itertools import permutations

from torch import Tensor

from kvkeep_lab.evals.metrics import CODE, F1, NUMBER, label_of
from kvkeep_lab.evals.prompts import Frame, Prompt, Question, Task, numbered, placed
from kvkeep_lab.evals.recipes import labelled, repository
from kvkeep_lab.evals.recipes.people import CITIES, THINGS, WORDS, Life, lives

_MOST = 100_000  # examples or definitions, which can come again
_FEWEST_DISTINCT = 0.3  # of the paragraphs that are counted


def _passage_retrieval(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Numbered paragraphs about people, and what one says in other words: which one is it?

    After LongBench's PassageRetrieval-en, whose paragraphs are Wikipedia's and whose abstracts a
    model wrote. Here both are made from the same facts, and no other paragraph has them all.
    """
    one, *people = lives(draw, frame.length)
    abstract = _abstract(one)
    others = [other.paragraph for other in people if _abstract(other) != abstract]

    def told(count: int) -> tuple[str, Question]:
        shown, place = placed(one.paragraph, others[: count - 1], depth)
        question = (
            f"Here is an abstract of one of the paragraphs: {abstract}\n"
            "Which paragraph is it of? Answer with its number."
        )
        asked = Question(question, "It is of Paragraph", (str(place + 1),), NUMBER)
        return numbered("Paragraph", shown), asked

    return frame.filled(told, 2, 1 + len(others), depth)


def _passage_count(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Numbered paragraphs about people, some of them several times: how many are different?

    After LongBench's PassageCount, whose paragraphs are Wikipedia's.
    """
    paragraphs, seed = [one.paragraph for one in lives(draw, frame.length)], draw.random()
    share = draw.uniform(_FEWEST_DISTINCT, 1)

    def told(count: int) -> tuple[str, Question]:
        distinct, mixed = max(2, round(share * count)), random.Random(seed)
        shown = paragraphs[:distinct]
        shown += mixed.choices(shown, k=count - distinct)
        mixed.shuffle(shown)
        question = (
            "Some paragraphs may come several times. How many different ones are there? Answer "
            "with a number."
        )
        start = "The number of different paragraphs is"
        return numbered("Paragraph", shown), Question(question, start, (str(distinct),), NUMBER)

    return frame.filled(told, 3, len(paragraphs), depth)


def _multi_document_qa(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Passages about people and about the firms that they work for: what is true of the firm of one
    person? The answer takes two passages, and the name of the firm leads from one to the other.

    After LongBench's HotpotQA, 2WikiMQA and MuSiQue, and HELMET's retrieval-augmented HotpotQA,
    whose passages are Wikipedia's and whose questions people wrote. There, distractors are
    passages that a search found; here, all others, of which half are about firms.
    """
    one, *others = lives(draw, frame.length)
    names = [f"{a} & {b}" for a, b in permutations(WORDS["last_names"], 2)]
    firm, *firms = draw.sample(names, len(names))
    about, city, founded, things = _firm(firm, draw)
    where = f"the firm where {one.name} works"
    questions = (
        (f"In which city is the office of {where}?", "The office is in", city),
        (f"In which year was {where} founded?", "It was founded in", founded),
        (f"In what does {where} deal?", "It deals in old", things),
    )
    question, start, answer = draw.choice(questions)
    question += " Answer with one word."
    asked = Question(question, start, (answer,), F1)
    seed = draw.random()

    def told(count: int) -> tuple[str, Question]:
        other = random.Random(seed)
        around = firms[: max(1, min(len(firms), count // 2))]
        shown = [_firm(name, other)[0] for name in around]
        shown += [_worker(person, other.choice(around)) for person in others[: count - len(shown)]]
        other.shuffle(shown)
        shown, _ = placed(_worker(one, firm), shown, depth)
        shown.insert(other.randrange(len(shown) + 1), about)
        return numbered("Passage", shown), asked

    return frame.filled(told, 2, len(others), depth)


def _few_shot(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Questions with their types, and a question: what is its type?

    After LongBench's TREC, whose questions people asked and whose types are 50. Here are six, and
    three forms of questions for each, filled with names, places and things. Another question of the
    same form is among the examples.
    """
    types = WORDS["types"]
    shown, (question, kind) = labelled.examples(types, draw)
    asked = Question(f"Question: {question}", "Type:", (kind,), label_of(tuple(types)))

    def told(count: int) -> tuple[str, Question]:
        return "\n\n".join(f"Question: {x}\nType: {of}" for x, of in shown(count)), asked

    return frame.filled(told, len(types), _MOST, depth)


def _code_completion(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Definitions from a repository, and lines of a file that imports one of them: the next line
    uses it. What is that line?

    After LongBench's RepoBench-P (arXiv 2306.03091), whose repositories are from GitHub. Here the
    repository is the standard library of the Python that runs this, so other versions give other
    prompts, and a model may have learned it. No definition shown has the line itself.
    """
    one = draw.choice(repository.gaps())
    near, far = one.others()
    others = draw.sample(near, len(near)) + draw.sample(far, len(far))
    # The last space is the model's: it belongs to a word's token.
    asked = Question(one.before, " " * (one.indentation - 1), (one.line,), CODE)

    def told(count: int) -> tuple[str, Question]:
        around = [other.text for other in others[: count - 1]]
        return "\n\n".join(placed(one.definition.text, around, depth)[0]), asked

    return frame.filled(told, 1, len(others), depth)


def _abstract(one: Life) -> str:
    return (
        f"The {one.job}, who comes from {one.born}, studied {one.subject} and collects "
        f"{one.things}."
    )


def _firm(name: str, draw: random.Random) -> tuple[str, str, str, str]:
    """A passage about a firm, and the city, year and things in it."""
    city, year, things = draw.choice(CITIES), str(1900 + draw.randrange(90)), draw.choice(THINGS)
    passage = (
        f"{name} is a firm that deals in old {things}. It was founded in {year}. Its office is "
        f"in {city}."
    )
    return passage, city, year, things


def _worker(one: Life, firm: str) -> str:
    return (
        f"{one.name} was born in {one.born} in {one.year}, studied {one.subject} and works at "
        f"{firm} as its {one.job}."
    )


TASKS = {
    "passage-retrieval": Task(_passage_retrieval, 8),
    "passage-count": Task(_passage_count, 8),
    "multi-document-qa": Task(_multi_document_qa, 16),
    "few-shot": Task(_few_shot, 8, chat=False),
    "code-completion": Task(_code_completion, 48, chat=False),
}
"""LongBench's kinds by name."""
