"""Tasks on a long prompt: what is asked, and how an answer is scored."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from kvkeep_lab.evals.answers import answered, scored
from kvkeep_lab.evals.run import evaluate
from kvkeep_lab.evals.tasks import GROUPS, TASKS, chosen
from support.task_prompts import Characters, Chatting, made, words_of
from support.tiny_host import TinyHost, TinyModel

from kvkeep.errors import ShapeError, SpecError
from kvkeep.host import host_of, register


class Scripted(TinyModel):
    """A model that gives this answer after a prompt of so many chunks. `fed` has the tokens of
    each forward."""

    def __init__(self, answer, chunks=6):
        super().__init__(1, vocabulary=128, context=10_000)
        self.answer, self.chunks, self.fed = answer, chunks, []


class ScriptedHost(TinyHost):
    """What kvkeep asks of a `Scripted`."""

    def end_tokens(self):
        return {4}

    def feed(self, ids, cache):
        self.forward(ids, cache)

    def forward(self, ids, cache, **options):
        model, logits = self.model, torch.zeros(1, 1, 128)
        super().forward(ids, cache, **options)
        model.fed.append(ids.shape[1])
        logits[0, 0, ord(model.answer[max(0, len(model.fed) - model.chunks)])] = 1
        return logits


register(Scripted, ScriptedHost)


def answer_of(model, prompt, chunk, **options):
    """The model's answer to a prompt through a new cache."""
    cache, tokenizer = host_of(model).new_cache(), Characters()
    return answered(model, tokenizer, cache, prompt, chunk, **options)


@pytest.mark.parametrize("tokenizer", [Characters(), Chatting()])
def test_a_needle_is_hidden_and_asked_for(tokenizer):
    found = made("needle", tokenizer)
    assert [prompt.depth for prompt in found] == [10, 30, 50, 70, 90]
    assert len({prompt.answers for prompt in found}) == len(found)
    for prompt in found:
        assert prompt.ids.shape == (1, 600)
        words = tokenizer.decode(prompt.ids[0].tolist())
        assert words.count("\x02") == 1
        (hidden,) = re.finditer(r"\nThe secret number of (\w+) is (\d{5})\.\n", words)
        name, number = hidden.groups()
        assert (number,) == prompt.answers
        assert words.count(number) == 1
        assert f"What is the secret number of {name}?" in words
        assert words.endswith(f"The secret number of {name} is")
        assert abs(hidden.start() / 600 - prompt.depth / 100) < 0.25
    starts = [tokenizer.decode(p.ids[0].tolist()).index(*p.answers) for p in found]
    assert starts == sorted(starts)
    assert ("</user><assistant>The secret" in words) == isinstance(tokenizer, Chatting)


def test_what_is_continued_is_no_chat():
    for task in ("few-shot", "many-shot", "code-completion"):
        chat, plain = (made(task, x, 2000)[0].ids for x in (Chatting(), Characters()))
        assert chat.equal(plain)


def test_many_needles_go_round_the_names():
    found = made("needle", samples=11)
    assert [prompt.depth for prompt in found] == list(range(10, 91, 8))


def test_the_several_hidden_numbers():
    for prompt in made("multi-key", length=1500):
        text, question = words_of(prompt)
        numbers = dict(re.findall(r"secret number of (\w+) is (\d{5})", text))
        (name,) = set(re.findall(r"number of (\w+)", question))
        assert len(numbers) == 4
        assert prompt.answers == (numbers[name],)
    for prompt in made("multi-query", length=1500):
        text, question = words_of(prompt)
        numbers = dict(re.findall(r"secret number of (\w+) is (\d{5})", text))
        assert {n: True for n in numbers if n in question} == dict.fromkeys(numbers, True)
        assert prompt.answers == tuple(numbers.values())
    for prompt in made("multi-value", length=1500):
        text, question = words_of(prompt)
        pairs = re.findall(r"of the secret numbers of (\w+) is (\d{5})", text)
        assert prompt.answers == tuple(number for _, number in pairs)
        assert len(set(prompt.answers)) == 4
        assert {name for name, _ in pairs} == set(re.findall(r"numbers of (\w+)", question))


def test_variables_form_one_chain_from_the_number():
    for prompt in made("variables", length=1500):
        text, question = words_of(prompt)
        chain = re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", text)
        number = chain[0][1]
        assert number in question
        names = [name for name, _ in chain]
        assert [value for _, value in chain[1:]] == names[:-1]
        assert prompt.answers == tuple(names)
        assert len(set(names)) == 5


@pytest.mark.parametrize("length", [1500, 6000, 60000])
def test_common_words_come_ten_times_as_often(length):
    (prompt,) = made("common-words", length=length, samples=1)
    assert 0.9 * length < prompt.ids.shape[1] <= length
    text, _ = words_of(prompt)
    counts = Counter(re.findall(r"\d\. (\w+)", text))
    common = {word for word, _ in counts.most_common(10)}
    assert common == set(prompt.answers)
    assert {counts[w] for w in common} == {10 * counts[w] for w in counts if w not in common}


def test_frequent_words_are_the_first_three_after_the_dots():
    (prompt,) = made("frequent-words", length=6000, samples=1)
    assert 5900 < prompt.ids.shape[1] <= 6000
    text, _ = words_of(prompt)
    ranked = Counter(text.removeprefix("\x02").split()).most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *prompt.answers]
    assert ranked[1][1] / ranked[3][1] == pytest.approx(16 / 4, rel=0.2)  # 2 ** -2 to 4 ** -2
    assert ranked[3][1] > ranked[4][1]


def test_a_question_about_one_person_has_one_answer_in_the_text():
    told = {
        "born": r"{} was born in (\w+)",
        "work?": r"{1} moved to (\w+)",
        "study": r"After a degree in (\w+), {1} ",
        "job": r"{1} moved to \w+, works there as a (\w+)",
        "collect": r"collection of old (\w+)",
    }
    kinds = set()
    for prompt in made("qa", length=3000, samples=30):
        text, question = words_of(prompt)
        name = re.findall(r"[A-Z]\w+ [A-Z]\. [A-Z]\w+", question)[0]
        (life,) = (line for line in text.splitlines() if f"{name} was" in line)
        (kind,) = (word for word in told if word in question.split("\n\n")[1].split("?")[0] + "?")
        kinds.add(kind)
        assert re.findall(told[kind].format(name, name.split()[0]), life) == list(prompt.answers)
        names = re.findall(r"(\w+ \w\. \w+) was born in", text)
        assert len(set(names)) == len(names) > 10
        assert names.index(name) / len(names) == pytest.approx(prompt.depth / 100, abs=0.1)
    assert kinds == set(told)


@pytest.mark.parametrize("task", TASKS)
def test_equal_seeds_make_equal_prompts_that_fit(task):
    first, again, other = (made(task, length=2000, seed=s) for s in (0, 0, 1))
    assert [p.answers for p in first] == [p.answers for p in again]
    for one, same, new in zip(first, again, other, strict=True):
        assert one.ids.equal(same.ids)
        assert not one.ids.equal(new.ids)
        assert (one.seed, new.seed) == (0, 1)
        assert 1000 < one.ids.shape[1] <= 2000


@pytest.mark.parametrize(
    ("answer", "found", "steps"),
    [
        (" {}.", True, 6),
        (" {:,}. And", True, 7),
        (" 1\x03{}   ", False, 3),
        (" 1\x04{}   ", False, 3),
        (" unknown, sorry", False, 12),
        ("          {}", False, 12),
    ],
)
def test_an_answer_counts_when_it_has_the_number(answer, found, steps):
    prompt = made("needle")[0]
    model = Scripted(answer.format(int(*prompt.answers)) + " " * 9)
    assert answer_of(model, prompt, 100).score == found
    # The prompt in chunks of 100; the answer's last token need not be fed.
    assert model.fed == [100] * 6 + [1] * (steps - 1)


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("\n {}, 0\nPassage", "\n {}, 0\n", 0.5),  # not cut where it is right
        (" is 0, I guess", " is 0, I", 0),
        (" {}\x03 0", " {}", 1),
    ],
)
def test_an_answer_of_a_line_is_scored_whole(answer, text, score):
    (prompt,) = made("passage-count", length=2000, samples=1)
    answer, text = (one.format(*prompt.answers) for one in (answer, text))
    model = Scripted(answer + " " * 9, 1)
    found = answer_of(model, prompt, None)
    assert (found.text, found.score) == (text, score)


def test_a_score_is_the_share_of_what_was_asked():
    prompt = made("variables", length=1500)[0]
    one, *_, last = prompt.answers
    text = [ord(c) for c in f" {last.lower()} and {one}"]
    assert scored(Characters(), prompt, text).score == 2 / 5
    assert scored(Characters(), prompt, []).score == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_context_without_room_for_the_task_is_refused(task):
    with pytest.raises(ShapeError, match=f"task {task} takes .* use a context of"):
        made(task, length=100)


def test_tasks_without_room_are_skipped_and_the_others_measured(tmp_path):
    (tmp_path / "text").write_text("The text goes on and on.\n" * 200)
    model, tokenizer = Scripted("x" * 500), Characters()
    options = {"continuation": 2, "tasks": ["common-words", "needle"], "samples": 1}
    options["text_file"] = tmp_path / "text"
    found = evaluate(model, tokenizer, ["keep_all"], contexts=[300, 2500], **options)
    assert [list(row["tasks"]) for row in found["rows"]] == [["needle"], ["common-words", "needle"]]
    (skipped,) = found["skipped"]
    assert (skipped["context"], skipped["task"]) == (300, "common-words")
    assert "a context of 300 tokens, but task common-words takes" in skipped["reason"]


@pytest.mark.slow
def test_there_is_room_for_an_answer_in_a_numbered_list(smollm2):
    _, tokenizer = smollm2
    for prompt in made("variables", tokenizer, 1000):
        lines = "".join(f"\n{at}. VAR {name}" for at, name in enumerate(prompt.answers, 1))
        assert len(tokenizer(lines, add_special_tokens=False).input_ids) <= prompt.steps


def test_groups_and_names_choose_tasks():
    assert chosen(["qa", "longbench", "few-shot", "qa"]) == ["qa", *GROUPS["longbench"]]
    assert set(chosen(["ruler", "longbench", "helmet"])) == set(chosen(["all"])) == set(TASKS)
    with pytest.raises(SpecError, match=r"no task 'sum'; there is needle, .*, ruler, longbench"):
        chosen(["ruler", "sum"])


@pytest.mark.slow
def test_a_real_model_finds_them_with_all_tokens_and_not_with_few(smollm2):
    found = evaluate(*smollm2, ["keep_all", "window:32"], contexts=[150], continuation=4, windows=1)
    full, window = found["rows"]
    assert full["retrieval"] == 1.0
    assert full["retrieval_by_depth"] == dict.fromkeys(("10", "30", "50", "70", "90"), 1.0)
    assert full["tasks"]["needle"]["low"] == pytest.approx(0.5655, abs=1e-3)
    assert window["retrieval"] < 0.5
    assert full["bytes"] == 30 * 150 * (2 * 3 * 64 * 4 + 4)
    assert window["perplexity_ratio"] > 1


def test_a_late_question_comes_after_the_text():
    prompt = made("needle")[0]
    model = Scripted(f" {prompt.answers[0]}." + " " * 9, 2)
    assert answer_of(model, prompt, None, late=True).score == 1
    assert model.fed[0] == prompt.text
    assert sum(model.fed[:2]) == 600
    text, asked = words_of(prompt)
    assert "What is" not in text
    assert asked.strip().startswith("What is the secret number")
