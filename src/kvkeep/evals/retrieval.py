"""Retrieval: does a model still find a number that is hidden in a long prompt?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.evals.forward import STEP_COST, Tick, fill
from kvkeep.host import Host, ModelCache
from kvkeep.host.compress import compress, compresses

DEPTHS = (10, 30, 50, 70, 90)
"""Where numbers are hidden, in percent of the text before them."""

ANSWER_TOKENS = 12
"""Most tokens of an answer. Its first words are in the prompt, so the number should come next."""

_NAMES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dublin", "Athens")
_SEEK = 100  # most tokens that a sentence is moved back by, to the start of a line


@dataclass(frozen=True)
class Probe:
    """A prompt of token ids (1, n), of which the first `text` come before the question, and the
    number that its answer should contain."""

    depth: int
    prompt: Tensor
    number: str
    text: int


def probes(tokenizer: Any, text: Tensor, length: int, seed: int = 0) -> list[Probe]:
    """One prompt of `length` tokens for each depth: text with a number hidden in it, then the
    question, then the first words of the answer; formatted as a chat if the tokenizer has a chat
    template.

    Args:
        text: token ids (n,) of a window of text, at least `length`.
        seed: determines numbers and names.

    Raises:
        ShapeError: the length leaves no room for the question.
    """
    draw = random.Random(seed)
    text = text[len(tokenizer("").input_ids) :]  # the prompt brings its own first token
    names = draw.sample(_NAMES, len(DEPTHS))
    return [
        _probe(tokenizer, text, length, depth, name, str(draw.randint(10000, 99999)))
        for depth, name in zip(DEPTHS, names, strict=True)
    ]


def recovered(
    host: Host,
    tokenizer: Any,
    cache: ModelCache,
    probe: Probe,
    chunk: int | None,
    tick: Tick,
    *,
    late: bool = False,
) -> bool:
    """Whether the greedy answer through an empty cache contains the hidden number. `late`: the
    question is fed when the text has been read."""
    prompt = probe.prompt.to(host.device)
    if late or compresses(cache):
        text, prompt = prompt[:, : probe.text], prompt[:, probe.text :]
        fill(host, cache, text, chunk, tick)
        if compresses(cache):
            compress(host, cache, text, tick=tick)
    logits = fill(host, cache, prompt, chunk, tick)
    answer: list[int] = []
    for left in reversed(range(ANSWER_TOKENS)):
        token = logits.argmax(dim=-1, keepdim=True)
        answer.append(int(token))
        found = probe.number in tokenizer.decode(answer).replace(",", "")
        if found or answer[-1] == tokenizer.eos_token_id:
            return found
        if left:
            logits = fill(host, cache, token, None, tick)
    return False


def cost(length: int) -> int:
    """The highest cost of all probes of one text, for prompts of `length` tokens; see `Tick`."""
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
    prompt = torch.cat([head, text[:cut], hidden, text[cut:room], tail])
    return Probe(depth, prompt[None], number, length - len(tail))


def _frame(tokenizer: Any) -> tuple[str, str]:
    """The text before a user's message, and the text between its end and the answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        return "", "\n"
    mark = "<text>"
    chat: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = chat.partition(mark)
    # The template writes the tokenizer's first token as text; the prompt has it already.
    first = tokenizer.decode(tokenizer("").input_ids)
    return before.removeprefix(first), after


def _line_start(tokenizer: Any, text: Tensor, cut: int) -> int:
    """The last start of a line shortly before `cut`, or else `cut`."""
    for place in range(cut, max(0, cut - _SEEK), -1):
        if tokenizer.decode([int(text[place - 1])]).endswith("\n"):
            return place
    return cut
