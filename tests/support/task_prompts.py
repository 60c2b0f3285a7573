"""Prompts of tasks, by a tokenizer of characters, so that a test can read them."""

from __future__ import annotations

from types import SimpleNamespace

from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.tasks import prompts


class Characters:
    """A tokenizer of one token a character, which begins a text with token 2."""

    chat_template = None
    eos_token_id = 3

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [2] * add_special_tokens + [ord(c) for c in text]
        return SimpleNamespace(input_ids=ids)

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(one) for one in ids if not (skip_special_tokens and one in (2, 3)))


class Chatting(Characters):
    chat_template = "one"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return f"\x02<user>{messages[0]['content']}</user><assistant>"


def made(task, tokenizer=None, length=600, samples=5, seed=0):
    tokenizer = tokenizer or Characters()
    text = windows_of_text(tokenizer, 1, length)[0]
    return prompts(task, tokenizer, text, length, samples, seed)


def words_of(prompt):
    """The text before the question, and the question."""
    ids = prompt.ids[0].tolist()
    return (Characters().decode(part) for part in (ids[: prompt.text], ids[prompt.text :]))
