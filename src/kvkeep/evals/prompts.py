"""Prompts with a text, a question about it, and the first words of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import ShapeError

_SEEK = 100  # most tokens that a sentence is moved back by, to the start of a line


@dataclass(frozen=True)
class Prompt:
    """Token ids (1, n), of which the first `text` come before the question, and what the answer of
    at most `steps` tokens should contain; `depth` says where that is, in percent of the text."""

    ids: Tensor
    text: int
    answers: tuple[str, ...]
    steps: int
    depth: int


@dataclass(frozen=True)
class Asked:
    """A question, the first words of its answer, and the rest of the answer."""

    question: str
    start: str
    answers: tuple[str, ...]


class Frame:
    """What stands around the text and the question: a chat if the tokenizer has a chat template.

    Args:
        length: most tokens of a prompt.
        steps: most tokens of an answer.
        task: whose prompts these are, for errors.
    """

    def __init__(self, tokenizer: Any, length: int, steps: int, task: str) -> None:
        self.tokenizer, self.length, self.steps, self.task = tokenizer, length, steps, task
        before, self._after = _around(tokenizer)
        self._head = torch.cat([torch.tensor(tokenizer("").input_ids).long(), self._ids(before)])

    def hiding(
        self, text: Tensor, hidden: Sequence[tuple[int, str]], asked: Asked, depth: int
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
        self, make: Callable[[int], str], least: int, most: int, asked: Asked, depth: int
    ) -> Prompt:
        """A prompt of at most `length` tokens with the text `make(n)` of the largest n from `least`
        to `most` that fits.

        Raises:
            ShapeError: the length leaves no room for `make(least)`.
        """
        tail = self._tail(asked)
        self._room(tail, len(self._ids(make(least))))
        room = self._room(tail, 0)
        fits, more = least, most + 1
        while more - fits > 1:
            # A text grows almost in proportion, so doubling first costs few tokens.
            middle = min(2 * fits, (fits + more) // 2)
            if len(self._ids(make(middle))) <= room:
                fits = middle
            else:
                more = middle
        return self._prompt(self._ids(make(fits)), tail, asked, depth)

    def _prompt(self, body: Tensor, tail: Tensor, asked: Asked, depth: int) -> Prompt:
        ids = torch.cat([self._head, body, tail])
        return Prompt(ids[None], len(ids) - len(tail), asked.answers, self.steps, depth)

    def _tail(self, asked: Asked) -> Tensor:
        return self._ids(f"\n\n{asked.question}{self._after}{asked.start}")

    def _room(self, tail: Tensor, inside: int) -> int:
        room = self.length - len(self._head) - len(tail) - inside
        if room < 0:
            raise ShapeError(
                f"a context of {self.length} tokens, but task {self.task} takes "
                f"{self.length - room}; use a context of {self.length - room + 100}, or leave "
                "the task out"
            )
        return room

    def _ids(self, words: str) -> Tensor:
        ids = self.tokenizer(words, add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(ids).long()


def _around(tokenizer: Any) -> tuple[str, str]:
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
