"""Tasks of the kinds of HELMET (arXiv 2410.02694): recall by a key, ranking of passages, learning
from many examples, answers that cite their sources."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from uuid import UUID

from torch import Tensor

from kvkeep_lab.evals.metrics import CITATIONS, NUMBER, ndcg
from kvkeep_lab.evals.prompts import Frame, Prompt, Question, Task, numbered
from kvkeep_lab.evals.recipes import labelled
from kvkeep_lab.evals.recipes.people import CITIES, JOBS, THINGS, WORDS, Life, life, lives

_MOST = 100_000  # pairs or examples
_GRADES = (3, 2, 2, 1)  # of the relevant passages
_CITED = 4  # passages of an answer


def _key_value(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """A JSON object of random identifiers: what is the value of one?

    After HELMET's JSON KV, which comes from N. F. Liu et al. (arXiv 2307.03172). HELMET shows two
    other questions with their answers first.
    """
    key, value, seed = _identifier(draw), _identifier(draw), draw.random()
    question = f'What is the value of the key "{key}" in the JSON object?'
    asked = Question(question, f'The value of the key "{key}" is "', (value,))

    def told(count: int) -> tuple[str, Question]:
        other = random.Random(seed)
        pairs = [(_identifier(other), _identifier(other)) for _ in range(count)]
        pairs.insert(count * depth // 100, (key, value))
        return json.dumps(dict(pairs), indent=0), asked

    return frame.filled(told, 1, _MOST, depth)


def _reranking(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Numbered passages about people, and a search for someone of three properties: which passages
    fit best?

    After HELMET's MS MARCO, whose queries and passages are Bing's and whose grades people gave.
    Here a passage's grade is how many of the three it has: one has all, two have two, one has one,
    and all others none. HELMET shows two other queries with their rankings first.
    """
    born, job, things = draw.choice(CITIES), draw.choice(JOBS), draw.choice(THINGS)

    def grade(one: Life) -> int:
        return (one.born == born) + (one.job == job) + (one.things == things)

    people, seed = lives(draw, frame.length), draw.random()
    wanted = zip(people, _GRADES, strict=False)
    relevant = [_life_that(person.name, draw, grade, of) for person, of in wanted]
    others = [one for one in people[len(_GRADES) :] if grade(one) == 0]
    question = (
        f"Query: someone who was born in {born}, works as {job} and collects {things}\n"
        "Rank the passages by how well they fit the query. Answer with the numbers of the ten "
        "best, the best first, and > between them."
    )

    def asked(shown: list[Life]) -> Question:
        best = tuple(str(shown.index(one) + 1) for one in relevant)
        return Question(question, "Ranking:", best, ndcg(_GRADES))

    return frame.filled(_mixed(relevant, others, seed, asked), 3, len(others), depth)


def _many_shot(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Requests to a bank with numbers for what they are about, and a request: what is its number?

    After HELMET's many-shot learning (TREC, NLU, BANKING77, CLINC150), whose labels are numbers
    too, so that a model cannot know them. Here are ten, instead of up to 151, and three forms of
    requests for each, filled with cities, days and amounts. Another request of the same form is
    among the examples.
    """
    requests = WORDS["requests"]
    numbers = dict(zip(requests, draw.sample(range(len(requests)), len(requests)), strict=True))
    shown, (request, label) = labelled.examples(requests, draw)
    asked = Question(f"Request: {request}", "Label:", (str(numbers[label]),), NUMBER)

    def told(count: int) -> tuple[str, Question]:
        found = [f"Request: {request}\nLabel: {numbers[of]}" for request, of in shown(count)]
        return "\n\n".join(found), asked

    return frame.filled(told, len(requests), _MOST, depth)


def _citations(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Numbered passages about people: who has a certain job in a certain city? Each of the four
    names is to be given with the number of the passage that says so.

    After HELMET's QAMPARI, of ALCE (arXiv 2305.14627), whose passages are Wikipedia's. There,
    another model judges whether a cited passage supports what is said. Here exactly one does, so
    the score needs no judge.
    """
    job, home = draw.choice(JOBS), draw.choice(CITIES)

    def fits(one: Life) -> bool:
        return (one.job, one.home) == (job, home)

    people, seed = lives(draw, frame.length), draw.random()
    wanted = [_life_that(person.name, draw, fits, True) for person in people[:_CITED]]
    others = [one for one in people[_CITED:] if not fits(one)]
    question = (
        f"Which {_CITED} people work in {home} as {job}? Answer in one line, with the number of "
        "the passage that says so in brackets after each name: NAME [1], NAME [2]."
    )

    def asked(shown: list[Life]) -> Question:
        answers = tuple(f"{one.name} [{shown.index(one) + 1}]" for one in wanted)
        return Question(question, "Answer:", answers, CITATIONS)

    return frame.filled(_mixed(wanted, others, seed, asked), 3, len(others), depth)


def _mixed(
    relevant: list[Life], others: list[Life], seed: float, asked: Callable[[list[Life]], Question]
) -> Callable[[int], tuple[str, Question]]:
    """The passages about relevant and some other people in a random order, and the question."""

    def told(count: int) -> tuple[str, Question]:
        shown = relevant + others[:count]
        random.Random(seed).shuffle(shown)
        return numbered("Passage", [one.paragraph for one in shown]), asked(shown)

    return told


def _life_that(name: str, draw: random.Random, value: Callable[[Life], int], wanted: int) -> Life:
    """One that has this value; at most one in 512 has it."""
    while value(found := life(name, draw)) != wanted:
        pass
    return found


def _identifier(draw: random.Random) -> str:
    return str(UUID(int=draw.getrandbits(128), version=4))


TASKS = {
    "key-value": Task(_key_value, 48),
    "reranking": Task(_reranking, 64),
    "many-shot": Task(_many_shot, 8, chat=False),
    "citations": Task(_citations, 64),
}
"""HELMET's kinds by name."""
