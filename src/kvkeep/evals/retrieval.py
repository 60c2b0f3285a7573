"""Hidden numbers: can a model still find a sentence somewhere in a long prompt?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.evals.forward import STEP_COST, Tick, fill

DEPTHS = (10, 30, 50, 70, 90)
"""Where numbers are hidden, in percent of the text."""

ANSWER_TOKENS = 12
"""Most tokens of an answer; its first words are given, so the number comes next."""

_NAMES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dublin", "Athens")
_SEEK = 100  # tokens by which a sentence moves to stand on a line of its own


@dataclass(frozen=True)
class Probe:
    """A prompt (1, n) of token ids, and the number that its answer should have."""

    depth: int
    prompt: Tensor
    number: str


def probes(tokenizer: Any, text: Tensor, length: int, seed: int = 0) -> list[Probe]:
    """One prompt of `length` tokens for each depth: text with a number hidden in it, then the
    question, then the first words of the answer. It is formatted as a chat if the model has one.

    Args:
        text: ids (n,) of a window of text, at least `length`.
        seed: another one hides other numbers under other names.

    Raises:
        ShapeError: the length has no room for the question.
    """
    draw = random.Random(seed)
    text = text[len(tokenizer("").input_ids) :]  # a prompt has its first token already
    names = draw.sample(_NAMES, len(DEPTHS))
    return [
        _probe(tokenizer, text, length, depth, name, str(draw.randint(10000, 99999)))
        for depth, name in zip(DEPTHS, names, strict=True)
    ]


def recovered(
    model: Any, tokenizer: Any, cache: Any, probe: Probe, chunk: int | None, tick: Tick
) -> bool:
    """Whether the greedy answer through an empty cache contains the hidden number."""
    logits = fill(model, cache, probe.prompt.to(model.device), chunk, tick)
    answer: list[int] = []
    for left in reversed(range(ANSWER_TOKENS)):
        token = logits.argmax(dim=-1, keepdim=True)
        answer.append(int(token))
        found = probe.number in tokenizer.decode(answer).replace(",", "")
        if found or answer[-1] == tokenizer.eos_token_id:
            return found
        if left:
            logits = fill(model, cache, token, None, tick)
    return False


def cost(length: int) -> int:
    """Most that all probes of one text tick, for prompts of `length` tokens."""
    return len(DEPTHS) * (length + ANSWER_TOKENS * STEP_COST)


def _probe(tokenizer: Any, text: Tensor, length: int, depth: int, name: str, number: str) -> Probe:
    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False).input_ids).long()

    before, after = _frame(tokenizer)
    head = torch.cat([torch.tensor(tokenizer("").input_ids).long(), ids(before)])
    hidden = ids(f"\nThe secret number of {name} is {number}.\n")
    question = f"\n\nWhat is the secret number of {name}?"
    tail = ids(f"{question}{after}The secret number of {name} is")
    room = length - sum(map(len, (head, hidden, tail)))
    if room < len(DEPTHS):
        raise ShapeError(
            f"a context of {length} tokens, but hiding a number and asking for it takes "
            f"{length - room}; use a context of {length - room + 100}, or leave retrieval out"
        )
    cut = _line_start(tokenizer, text, room * depth // 100)
    return Probe(depth, torch.cat([head, text[:cut], hidden, text[cut:room], tail])[None], number)


def _frame(tokenizer: Any) -> tuple[str, str]:
    """What stands before a user's text, and between its end and the answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        return "", "\n"
    mark = "<text>"
    chat: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = chat.partition(mark)
    # The template spells the tokenizer's own first token out; it is put there already.
    first = tokenizer.decode(tokenizer("").input_ids)
    return before.removeprefix(first), after


def _line_start(tokenizer: Any, text: Tensor, cut: int) -> int:
    """The last start of a line shortly before `cut`, or else `cut`."""
    for place in range(cut, max(0, cut - _SEEK), -1):
        if tokenizer.decode([int(text[place - 1])]).endswith("\n"):
            return place
    return cut
