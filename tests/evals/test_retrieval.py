"""Hidden numbers: what is asked, and how an answer is scored."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from kvkeep.bench.text import windows_of_text
from kvkeep.errors import ShapeError
from kvkeep.evals import retrieval
from kvkeep.evals.run import evaluate


class Characters:
    """A tokenizer of one token a character, which begins a text with token 2."""

    chat_template = None
    eos_token_id = 3

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [2] * add_special_tokens + [ord(c) for c in text]
        return SimpleNamespace(input_ids=ids)

    def decode(self, ids):
        return "".join(map(chr, ids))


class Chatting(Characters):
    chat_template = "one"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return f"\x02<user>{messages[0]['content']}</user><assistant>"


class Scripted:
    """A host whose model gives this answer after a prompt of six chunks."""

    device = torch.device("cpu")

    def __init__(self, answer):
        self.answer = answer

    def forward(self, ids, cache):
        cache.append(ids.shape[1])
        logits = torch.zeros(1, 1, 128)
        logits[0, 0, ord(self.answer[max(0, len(cache) - 6)])] = 1
        return logits


def probes(tokenizer, length=600, seed=0):
    text = windows_of_text(tokenizer, 1, length)[0]
    return retrieval.probes(tokenizer, text, length, seed)


@pytest.mark.parametrize("tokenizer", [Characters(), Chatting()])
def test_a_probe_hides_a_number_and_asks_for_it(tokenizer):
    found = probes(tokenizer)
    assert [probe.depth for probe in found] == list(retrieval.DEPTHS)
    assert len({probe.number for probe in found}) == len(found)
    for probe in found:
        assert probe.prompt.shape == (1, 600)
        words = tokenizer.decode(probe.prompt[0].tolist())
        assert words.count("\x02") == 1
        (hidden,) = re.finditer(r"\nThe secret number of (\w+) is (\d{5})\.\n", words)
        name, number = hidden.groups()
        assert number == probe.number
        assert words.count(number) == 1
        assert f"What is the secret number of {name}?" in words
        assert words.endswith(f"The secret number of {name} is")
        assert abs(hidden.start() / 600 - probe.depth / 100) < 0.25
    starts = [tokenizer.decode(p.prompt[0].tolist()).index(p.number) for p in found]
    assert starts == sorted(starts)
    assert ("</user><assistant>The secret" in words) == isinstance(tokenizer, Chatting)


def test_other_seeds_hide_other_numbers():
    tokenizer = Characters()
    numbers = [{probe.number for probe in probes(tokenizer, seed=seed)} for seed in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]


class Fed(list):
    """How many tokens each forward was given; a cache without layers."""

    layers = ()


@pytest.mark.parametrize(
    ("answer", "found", "steps"),
    [
        (" {}.", True, 6),
        (" {:,}. And", True, 7),
        (" 1\x03{}   ", False, 3),
        (" unknown, sorry", False, retrieval.ANSWER_TOKENS),
        ("          {}", False, retrieval.ANSWER_TOKENS),
    ],
)
def test_an_answer_counts_when_it_has_the_number(answer, found, steps):
    tokenizer = Characters()
    probe = probes(tokenizer)[0]
    model, cache = Scripted(answer.format(int(probe.number)) + " " * 9), Fed()
    assert retrieval.recovered(model, tokenizer, cache, probe, 100, lambda cost: None) is found
    # The prompt in chunks of 100; the answer's last token need not be fed.
    assert cache == [100] * 6 + [1] * (steps - 1)


def test_a_context_without_room_for_the_question_is_refused():
    with pytest.raises(ShapeError, match="use a context of"):
        probes(Characters(), length=100)


@pytest.mark.slow
def test_a_real_model_finds_them_with_all_tokens_and_not_with_few(smollm2):
    found = evaluate(*smollm2, ["keep_all", "window:32"], contexts=[150], continuation=4, windows=1)
    full, window = found["rows"]
    assert full["retrieval"] == 1.0
    assert full["retrieval_by_depth"] == dict.fromkeys(("10", "30", "50", "70", "90"), 1.0)
    assert window["retrieval"] < 0.5
    assert full["bytes"] == 30 * 150 * (2 * 3 * 64 * 4 + 4)
    assert window["perplexity_ratio"] > 1


def test_a_late_question_comes_after_the_text():
    tokenizer, cache = Characters(), Fed()
    probe = probes(tokenizer)[0]
    model = Scripted(f" {probe.number}." + " " * 9)
    assert retrieval.recovered(model, tokenizer, cache, probe, None, lambda cost: None, late=True)
    assert cache[0] == probe.text
    assert sum(cache[:2]) == 600
    assert "What is" not in tokenizer.decode(probe.prompt[0, : probe.text].tolist())
    asked = tokenizer.decode(probe.prompt[0, probe.text :].tolist())
    assert asked.strip().startswith("What is the secret number")
