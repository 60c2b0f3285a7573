"""The recurrent states of several sequences in one packed forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.layer.recurrent import RecurrentStates


class StatesPart(NamedTuple):
    """Tokens of a packed forward that a recurrent layer computes at once: one token of each of
    `rows` sequences, or all tokens of one sequence.

    Args:
        states: the states of these sequences, one row each.
        tokens: the index of each token in the forward, int64 (n,).
    """

    states: RecurrentStates
    tokens: Tensor
    rows: int


class PackedStates(NamedTuple):
    """The parts of a packed forward, and `places`, int64 (n,): the index of each of the forward's
    tokens in the concatenation of the parts. No parts: the model has no recurrent layers."""

    parts: Sequence[StatesPart] = ()
    places: Tensor | None = None


def with_spare_rows(packed: PackedStates, rows: int) -> RecurrentStates | None:
    """A copy of the states of all sequences, padded to `rows` rows, which a program may change;
    None: some sequence has no states yet, or more than one token in the forward."""
    held = packed.parts[0].states.tensors()
    if len(packed.parts) > 1 or not held:
        return None
    made, copied = packed.parts[0].states.empty(), {}
    with torch.inference_mode(False), torch.no_grad():
        for name, x in held.items():
            copied[name] = torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=x.device)
            copied[name][: len(x)] = x
    made.load(copied)
    made.running = True
    return made


def take_back(packed: PackedStates, changed: RecurrentStates) -> None:
    """Copy the result of `with_spare_rows`, after a step, back to the sequences' states."""
    now = changed.tensors()
    with torch.inference_mode():  # allows in-place changes of tensors made in any mode
        for name, x in packed.parts[0].states.tensors().items():
            x.copy_(now[name][: len(x)])


class Rows:
    """The states of several sequences as the rows of common tensors. Each sequence's states become
    views of its row, so while the sequences stay the same, forwards copy nothing.

    Args:
        sequences: states of one row each.
    """

    def __init__(self, sequences: Sequence[RecurrentStates]) -> None:
        self.states = sequences[0].empty()
        held = [one.tensors() for one in sequences]
        self.states.load({name: torch.cat([x[name] for x in held]) for name in held[0]})
        self._tensors = self.states.tensors()
        self._copies = {name: torch.empty_like(x) for name, x in self._tensors.items()}
        for row, one in enumerate(sequences):
            one.load(_row(self._tensors, row))
            one.row_of = self, row  # `Rows` does not refer to `one`, so `one` can be freed

    @classmethod
    def of(cls, sequences: Sequence[RecurrentStates]) -> Rows:
        """The `Rows` that already consist of these sequences in this order, or a new one."""
        found = None if sequences[0].row_of is None else sequences[0].row_of[0]
        if isinstance(found, cls) and [one.row_of for one in sequences] == found._members():
            return found
        return cls(sequences)

    def _members(self) -> list[tuple[Rows, int]]:
        return [(self, row) for row in range(len(self))]

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def copied(self) -> list[Mapping[str, Tensor]]:
        """A copy of each row, valid until the next call."""
        for name, x in self._tensors.items():
            self._copies[name].copy_(x)
        return [_row(self._copies, row) for row in range(len(self))]


@contextmanager
def packed_states(
    sequences: Sequence[RecurrentStates],
    fed: Sequence[int],
    counts: Sequence[int],
    device: torch.device,
) -> Iterator[PackedStates]:
    """A context for one forward of all sequences. If the body raises, the states are restored.

    Args:
        sequences: states of one row each, or empty before the first token.
        fed: columns that each sequence's cache holds.
        counts: number of tokens of each sequence in the forward.
        device: the device of the model's token ids.

    Raises:
        StateError: an earlier forward of a sequence was interrupted.
    """
    if not any(sequences):
        yield PackedStates()
        return
    begun: list[RecurrentStates] = []
    before: list[Mapping[str, Tensor]] = []
    try:
        for one, columns in zip(sequences, fed, strict=True):
            one.begin(columns)
            begun.append(one)
        with torch.no_grad():
            found, before = _divided(sequences, counts, device)
        for one in sequences:
            one.change()
        yield found
        for one, columns, count in zip(sequences, fed, counts, strict=True):
            one.end(columns + count)
    except BaseException:
        for one, held in zip(sequences, before, strict=False):
            one.change()  # if this is interrupted too, the states are unknown
            one.load(held)
        for one, columns in zip(begun, fed, strict=False):
            one.end(columns)
        raise


def _divided(
    sequences: Sequence[RecurrentStates], counts: Sequence[int], device: torch.device
) -> tuple[PackedStates, list[Mapping[str, Tensor]]]:
    """The parts of a forward, and copies of each sequence's states."""
    firsts = list(accumulate(counts, initial=0))
    singles = [i for i, one in enumerate(sequences) if counts[i] == 1 and one.columns]
    before: dict[int, Mapping[str, Tensor]] = {}
    parts: list[StatesPart] = []
    if len(singles) > 1:
        rows = Rows.of([sequences[i] for i in singles])
        before |= zip(singles, rows.copied(), strict=True)
        rows.states.running = True
        tokens = torch.tensor([firsts[i] for i in singles], device=device)
        parts.append(StatesPart(rows.states, tokens, len(singles)))
    for i, one in enumerate(sequences):
        if i not in before:
            before[i] = {name: x.clone() for name, x in one.tensors().items()}
            tokens = torch.arange(firsts[i], firsts[i + 1], device=device)
            parts.append(StatesPart(one, tokens, 1))
    places = torch.cat([part.tokens for part in parts]).argsort()
    return PackedStates(parts, places), [before[i] for i in range(len(sequences))]


def _row(tensors: Mapping[str, Tensor], row: int) -> Mapping[str, Tensor]:
    return {name: x[row : row + 1] for name, x in tensors.items()}
