"""Tasks of the kinds of HELMET (arXiv 2410.02694): recall by a key, ranking of passages, learning
from many examples, answers that cite their sources."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from uuid import UUID

from torch import Tensor

from kvkeep_lab.evals.metrics import CITATIONS, NUMBER, ndcg
from kvkeep_lab.evals.prompts import Frame, Prompt, Question, Task
from kvkeep_lab.evals.recipes import labelled
from kvkeep_lab.evals.recipes.passages import numbered
from kvkeep_lab.evals.recipes.people import CITIES, JOBS, THINGS, Life, life, lives

_MOST = 100_000  # pairs or examples
_GRADES = (3, 2, 2, 1)  # of the relevant passages
_CITED = 4  # passages of an answer

_REQUESTS = {
    "lost card": (
        "I lost my card in {city} on {day}.",
        "Please block my card, it was stolen in {city}.",
        "My card has been missing since {day}.",
    ),
    "exchange": (
        "What rate do you use if I change {amount} euros in {city}?",
        "How many dollars do I get for {amount} euros on {day}?",
        "Is the exchange rate of {day} final?",
    ),
    "late transfer": (
        "My transfer of {amount} euros has not arrived since {day}.",
        "Where is the money that I sent to {city} on {day}?",
        "A payment to my friend in {city} is still pending.",
    ),
    "cash machine": (
        "The cash machine in {city} kept {amount} euros.",
        "The machine gave me too few notes on {day}.",
        "Your machine in {city} swallowed my notes.",
    ),
    "PIN": (
        "How do I choose a new PIN before {day}?",
        "I typed a wrong PIN in {city} and now it is locked.",
        "I forgot my PIN on {day}.",
    ),
    "address": (
        "I moved to {city} on {day}, so update my address.",
        "Which papers prove my new home in {city}?",
        "Send all letters to my new home in {city} from {day} on.",
    ),
    "fee": (
        "Why was I charged a fee of {amount} euros?",
        "Does it cost a fee to pay abroad, in {city}?",
        "Give the fee of {day} back to me.",
    ),
    "limit": (
        "Raise my daily limit to {amount} euros.",
        "What is the most that I can spend in {city}?",
        "A limit of {amount} euros is too low for me.",
    ),
    "closing": (
        "Close my account on {day}.",
        "How do I end my contract with the branch in {city}?",
        "I want to leave your bank before {day}.",
    ),
    "loan": (
        "Can I borrow {amount} euros until {day}?",
        "What interest is there on a loan of {amount} euros?",
        "I need a mortgage for a flat in {city}.",
    ),
}


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
    relevant = [
        _life_that(person.name, draw, grade, wanted)
        for person, wanted in zip(people, _GRADES, strict=False)
    ]
    others = [one for one in people[len(_GRADES) :] if grade(one) == 0]
    question = (
        f"Query: someone who was born in {born}, works as {job} and collects {things}\n"
        "Rank the passages by how well they fit the query. Answer with the numbers of the ten "
        "best, the best first, and > between them."
    )

    def told(count: int) -> tuple[str, Question]:
        shown = relevant + others[:count]
        random.Random(seed).shuffle(shown)
        best = tuple(str(shown.index(one) + 1) for one in relevant)
        asked = Question(question, "Ranking:", best, ndcg(_GRADES))
        return numbered("Passage", [one.paragraph for one in shown]), asked

    return frame.filled(told, 3, len(others), depth)


def _many_shot(frame: Frame, text: Tensor, draw: random.Random, depth: int) -> Prompt:
    """Requests to a bank with numbers for what they are about, and a request: what is its number?

    After HELMET's many-shot learning (TREC, NLU, BANKING77, CLINC150), whose labels are numbers
    too, so that a model cannot know them. Here are ten, instead of up to 151, and three forms of
    requests for each, filled with cities, days and amounts. Another request of the same form is
    among the examples.
    """
    numbers = dict(zip(_REQUESTS, draw.sample(range(len(_REQUESTS)), len(_REQUESTS)), strict=True))
    shown, (request, label) = labelled.examples(_REQUESTS, draw)
    asked = Question(f"Request: {request}", "Label:", (str(numbers[label]),), NUMBER)

    def told(count: int) -> tuple[str, Question]:
        found = [f"Request: {request}\nLabel: {numbers[of]}" for request, of in shown(count)]
        return "\n\n".join(found), asked

    return frame.filled(told, len(_REQUESTS), _MOST, depth)


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

    def told(count: int) -> tuple[str, Question]:
        shown = wanted + others[:count]
        random.Random(seed).shuffle(shown)
        answers = tuple(f"{one.name} [{shown.index(one) + 1}]" for one in wanted)
        asked = Question(question, "Answer:", answers, CITATIONS)
        return numbered("Passage", [one.paragraph for one in shown]), asked

    return frame.filled(told, 3, len(others), depth)


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
