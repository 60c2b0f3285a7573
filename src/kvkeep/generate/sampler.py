"""Sampler: chooses the tokens of one answer, and resumes a choice that was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import StateError
from kvkeep.generate.sampling import SamplingParams, sample


@dataclass
class _Choice:
    """The progress of a choice.

    Attributes:
        index: the token's index in the answer.
        random: the state of the random generator before the choice.
        begun: whether logits processors have been called.
        logits: the result of the processors, (1, V).
    """

    index: int
    random: Tensor | None
    begun: bool = False
    logits: Tensor | None = None


class Sampler:
    """Chooses the tokens of answer `index` of a prompt, from logits on `device`."""

    def __init__(self, params: SamplingParams, index: int, device: torch.device) -> None:
        self._params, self._device = params, device
        self._processors = [*params.processors, *(make() for make in params.own_processors)]
        self._choice = _Choice(-1, None)
        self._random: torch.Generator | None = None
        if params.temperature > 0:
            self._random = torch.Generator(device)
            seed = params.seed
            self._random.seed() if seed is None else self._random.manual_seed(seed + index)

    def choose(self, logits: Tensor, ids: Callable[[], Tensor], at: int) -> int:
        """Choose a token. After an interrupt, the same call chooses the same token.

        Args:
            logits: (V,).
            ids: returns the prompt's and the answer's tokens so far, int64 (n,).
            at: the token's index in the answer.

        Raises:
            StateError: the logits processors were interrupted.
            Exception: raised by a processor.
        """
        choice = self._choice
        if choice.index != at:
            random = None if self._random is None else self._random.get_state()
            choice = self._choice = _Choice(at, random)
        elif self._random is not None and choice.random is not None:
            self._random.set_state(choice.random)
        return int(sample(self._processed(logits, ids, choice), self._params, self._random))

    def _processed(self, logits: Tensor, ids: Callable[[], Tensor], choice: _Choice) -> Tensor:
        """Logits (1, V) after the logits processors."""
        row, processors = logits[None], self._processors
        if choice.logits is not None or not processors:
            return row if choice.logits is None else choice.logits
        if choice.begun:
            raise StateError(
                "the logits processors of this answer were interrupted and may have kept state; "
                "add its prompt again"
            )
        choice.begun = True
        text = ids()[None].to(self._device)
        for process in processors:
            row = process(text, row)
        choice.logits = row
        return row
