"""Prompts with a text, a question about it, and the first words of the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep_lab.evals.metrics import CONTAINED, Metric

_SEEK = 100  # most tokens that a sentence is moved back by, to the start of a line
_PLAIN = "", "\n"  # the texts before a text, and between a question and its answer


@dataclass(frozen=True)
class Prompt:
    """Token ids (1, n), of which the first `text` come before the question; the answers that are
    expected, in at most `steps` tokens, and how they are scored.

    Args:
        depth: place of the asked fact in the text, in percent of its length.
        seed: of the random draw of the prompt.
    """

    ids: Tensor
    text: int
    answers: tuple[str, ...]
    metric: Metric
    steps: int
    depth: int
    seed: int


@dataclass(frozen=True)
class Question:
    """A question, the first words of its answer, and the words that should follow them."""

    question: str
    start: str
    answers: tuple[str, ...]
    metric: Metric = CONTAINED


@dataclass(frozen=True)
class Task:
    """How a task's prompts are made, and most tokens of an answer.

    Args:
        make: of one prompt, in a frame, given a window of text, a source of random numbers and a
            depth in percent. None: the prompts of `needle`, whose names differ, are made together.
        chat: whether the text and the question are a message, if the model has a chat template.
            Otherwise the answer is the text after them.
    """

    make: Callable[[Frame, Tensor, random.Random, int], Prompt] | None
    steps: int
    chat: bool = True


class Frame:
    """The words around the text and the question: a chat if the tokenizer has a chat template and
    the task is to be one.

    Args:
        length: most tokens of a prompt.
        name: the task's, for errors.
        seed: of the random draw of the prompts.
    """

    def __init__(self, tokenizer: Any, length: int, name: str, task: Task, seed: int = 0) -> None:
        self.tokenizer, self.length, self.seed = tokenizer, length, seed
        self.name, self.steps = name, task.steps
        before, self._after = _around(tokenizer) if task.chat else _PLAIN
        self._head = torch.cat([torch.tensor(tokenizer("").input_ids).long(), self._ids(before)])

    def hiding(
        self, text: Tensor, hidden: Sequence[tuple[int, str]], asked: Question, depth: int
    ) -> Prompt:
        """A prompt of `length` tokens whose text hides sentences, each at a depth in percent.

        Args:
            text: token ids (n,) of a window of text, at least `length`.

        Raises:
            ShapeError: the length leaves no room for text.
        """
        text = text[len(self.tokenizer("").input_ids) :]  # the prompt brings its own first token
        tail, pieces = self._tail(asked), [self._ids(sentence) for _, sentence in hidden]
        room = self._room(tail, sum(map(len, pieces)))
        body, last = list[Tensor](), 0
        for (place, _), piece in zip(hidden, pieces, strict=True):
            cut = max(last, _line_start(self.tokenizer, text, room * place // 100))
            body += [text[last:cut], piece]
            last = cut
        return self._prompt(torch.cat([*body, text[last:room]]), tail, asked, depth)

    def filled(
        self, make: Callable[[int], tuple[str, Question]], least: int, most: int, depth: int
    ) -> Prompt:
        """A prompt of at most `length` tokens with the text and the question `make(n)` of the
        largest n from `least`, at least 1, to `most` that fits.

        Raises:
            ShapeError: the length leaves no room for `make(least)`.
        """
        fits, more = least, most + 1
        best = self._encoded(*make(least))
        self._room(best[1], len(best[0]))
        while more - fits > 1:
            # A text grows almost in proportion, so doubling first costs few tokens.
            middle = min(2 * fits, (fits + more) // 2)
            found = self._encoded(*make(middle))
            if len(self._head) + len(found[0]) + len(found[1]) <= self.length:
                fits, best = middle, found
            else:
                more = middle
        return self._prompt(*best, depth)

    def _encoded(self, text: str, asked: Question) -> tuple[Tensor, Tensor, Question]:
        """The tokens of a text and of the prompt after it."""
        return self._ids(text), self._tail(asked), asked

    def _prompt(self, body: Tensor, tail: Tensor, asked: Question, depth: int) -> Prompt:
        ids = torch.cat([self._head, body, tail])
        text = len(ids) - len(tail)
        return Prompt(ids[None], text, asked.answers, asked.metric, self.steps, depth, self.seed)

    def _tail(self, asked: Question) -> Tensor:
        return self._ids(f"\n\n{asked.question}{self._after}{asked.start}")

    def _room(self, tail: Tensor, inside: int) -> int:
        room = self.length - len(self._head) - len(tail) - inside
        if room < 0:
            raise ShapeError(
                f"a context of {self.length} tokens, but task {self.name} takes "
                f"{self.length - room}; use a context of {self.length - room + 100}, or leave "
                "the task out"
            )
        return room

    def _ids(self, words: str) -> Tensor:
        ids = self.tokenizer(words, add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(ids).long()


def placed(one: str, others: Sequence[str], depth: int) -> tuple[list[str], int]:
    """Passages with one more among them, at a depth in percent, and its index."""
    index = len(others) * depth // 100
    return [*others[:index], one, *others[index:]], index


def numbered(kind: str, passages: Sequence[str]) -> str:
    """Passages as *Kind 1: ...*, each on a line."""
    return "\n".join(f"{kind} {number}: {text}" for number, text in enumerate(passages, 1))


def _around(tokenizer: Any) -> tuple[str, str]:
    """The text before a user's message, and the text between its end and the answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        return _PLAIN
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
