"""Each task's answer follows from its prompt: a solver that reads only its text scores 1."""

from __future__ import annotations

import json
import random
import re
import statistics
import sysconfig
from pathlib import Path

import pytest
from kvkeep_lab.evals.recipes import repository
from kvkeep_lab.evals.tasks import GROUPS
from support.task_prompts import made, words_of

from kvkeep.errors import UnsupportedError

LIFE = (
    r"(?P<name>[\w. ]+) was born in (?P<born>\w+) in \d+\. After a degree in (?P<subject>\w+), \w+ "
    r"moved to (?P<home>\w+), works there as a (?P<job>\w+), and is known for a collection of old "
    r"(?P<things>\w+)\."
)


def passages(text):
    """The passages by their numbers, which count from 1."""
    found = dict(re.findall(r"^\W?(?:Paragraph|Passage) (\d+): (.*)$", text, re.M))
    assert list(found) == [str(number) for number in range(1, 1 + len(found))]
    assert len(found) > 10
    return found


def lives(text):
    found = {}
    for number, passage in passages(text).items():
        found[number] = re.fullmatch(LIFE, passage).groupdict()
    return found


def passage_retrieval(text, question):
    (wanted,) = re.findall(
        r"The (\w+), who comes from (\w+), studied (\w+) and collects (\w+)\.", question
    )
    facts = ("job", "born", "subject", "things")
    (number,) = (n for n, one in lives(text).items() if tuple(one[x] for x in facts) == wanted)
    return f" {number}."


def passage_count(text, question):
    return f" {len(set(passages(text).values()))}"


def multi_document_qa(text, question):
    (name,) = re.findall(r"the firm where (.*?) works", question)
    (passage,) = (p for p in passages(text).values() if p.startswith(f"{name} was"))
    (firm,) = re.findall(r"works at (.*) as its", passage)
    (about,) = (p for p in passages(text).values() if p.startswith(f"{firm} is a firm"))
    things, year, city = re.fullmatch(
        r".* that deals in old (\w+)\. It was founded in (\d+)\. Its office is in (\w+)\.", about
    ).groups()
    return {"which city": city, "which year": year, "what does": things}[
        re.findall(r"In (which \w+|what does)", question)[0]
    ]


def nearest(text, question, asked, label):
    """The label of the example that has most words of the question, names and numbers left out."""
    shown = re.findall(rf"{asked}: (.*)\n{label}: (\w+)", text)
    (query,) = re.findall(rf"{asked}: (.*)", question)
    assert query not in [one for one, _ in shown]

    def words(one):
        return set(re.findall(r"\b[a-z]+\b", one)) | {one.split()[0]}

    return max(shown, key=lambda one: len(words(one[0]) & words(query)))[1]


def few_shot(text, question):
    return nearest(text, question, "Question", "Type")


def many_shot(text, question):
    return nearest(text, question, "Request", "Label")


def code_completion(text, question):
    """What follows in the file and uses what is imported, whose definition the text must have."""
    file, importing, code, spaces = re.search(
        r"# (\S+\.py)\n(from [^\n]*)\n\n(.*)\n( *)", question, re.S
    ).groups()
    source = Path(sysconfig.get_paths()["stdlib"], file).read_text()
    *_, name = importing.split()
    head, *_ = code.splitlines()
    newest = "\n".join(code.splitlines()[-2:])
    *_, function = source.partition(f"\n{head}\n")
    line = re.search(rf"\n{re.escape(newest)}\s*\n{spaces} (\S.*)", f"\n{function}")[1]
    assert line not in text + code
    used = re.findall(rf"\b{name}\.(\w+)", line) or [name]
    assert any(re.search(rf"^(async )?(def|class) {one}\b", text, re.M) for one in used)
    return line


def key_value(text, question):
    (key,) = re.findall(r'key "(.*?)" in', question)
    return json.loads(text.strip("\x02"))[key]


def reranking(text, question):
    born, job, things = re.findall(r"born in (\w+), works as (\w+) and collects (\w+)", question)[0]
    grades = {
        number: (one["born"] == born) + (one["job"] == job) + (one["things"] == things)
        for number, one in lives(text).items()
    }
    return " > ".join(sorted(grades, key=lambda number: -grades[number])[:10])


def citations(text, question):
    count, home, job = re.findall(r"Which (\d) people work in (\w+) as (\w+)\?", question)[0]
    found = [
        f"{one['name']} [{number}]"
        for number, one in lives(text).items()
        if (one["home"], one["job"]) == (home, job)
    ]
    assert len(found) == int(count)
    return ", ".join(found)


SOLVERS = {
    "passage-retrieval": passage_retrieval,
    "passage-count": passage_count,
    "multi-document-qa": multi_document_qa,
    "few-shot": few_shot,
    "code-completion": code_completion,
    "key-value": key_value,
    "reranking": reranking,
    "many-shot": many_shot,
    "citations": citations,
}


@pytest.mark.parametrize("task", [*GROUPS["longbench"], *GROUPS["helmet"]])
def test_the_answer_follows_from_the_prompt(task):
    """And the answers to other prompts are worth little."""
    some = [prompt for length in (2500, 5000) for prompt in made(task, length=length, samples=5)]
    answers = []
    for prompt in some:
        answers.append(SOLVERS[task](*words_of(prompt)))
        assert prompt.metric.score(answers[-1], prompt.answers) == 1, answers[-1]
        assert len(answers[-1]) <= prompt.steps * 2.5  # characters, several to a token
    random.Random(0).shuffle(answers)
    scores = [p.metric.score(a, p.answers) for p, a in zip(some, answers, strict=True)]
    assert statistics.fmean(scores) < 0.45


def test_a_passage_lies_at_its_depth():
    for prompt in made("passage-retrieval", length=6000):
        text, _ = words_of(prompt)
        share = int(prompt.answers[0]) / len(passages(text))
        assert share == pytest.approx(prompt.depth / 100, abs=0.06)


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "_root", lambda: tmp_path)
    repository.gaps.cache_clear()
    with pytest.raises(UnsupportedError, match="leave out the task code-completion"):
        made("code-completion", length=2000)
