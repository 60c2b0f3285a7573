"""Step: a compiled decode step of a model, and the key by which later processes find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from sys import modules as imported
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, modeling_outputs

from kvkeep.graph.custom_ops import Ticket
from kvkeep.graph.package import Package
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import name_in
from kvkeep.hf.forward.packed import RowsCache
from kvkeep.hf.steps import saved_steps
from kvkeep.hf.steps.model_state import ModelState
from kvkeep.hf.weight_parts import is_plain, part_named, parts
from kvkeep.native_library import available

Program = Callable[[Sequence[Tensor], Sequence[Ticket]], Sequence[Tensor] | None]
"""Computes a step; see `kvkeep.graph.package.Package`."""


class Signature(NamedTuple):
    """The inputs and outputs of a step's program.

    Args:
        weights: the names of the model's parameters and buffers, or of their parts, that the
            program reads.
        places: the indices of these weights among the program's inputs, ascending.
        inputs: the other inputs, in order. A number i from 0 on is element i of all arguments
            followed by all recurrent states; -1 - i is the ticket i of the cache.
        logits: the index of the logits among the results.
        output: the name of the class of the model's output.
        states: the names of the recurrent states, which the program changes in place.
    """

    weights: list[str]
    places: list[int]
    inputs: list[int]
    logits: int = -1
    output: str = ""
    states: Sequence[str] = ()


class Step:
    """A program for the steps of a model.

    Attributes:
        fits: whether the model is unchanged since the step was made.
    """

    def __init__(self, model: PreTrainedModel, program: Program, signature: Signature) -> None:
        weights, places, self._inputs, self._logits, output, self._states = signature
        self._program = program
        self._given: list[Any] = [None] * (len(weights) + len(self._inputs))
        self._output = _output_class(model, output)
        self._cache_field = name_in(self._output)  # RecurrentGemma's output has no cache
        for place, name in zip(places, weights, strict=True):
            self._given[place] = part_named(model, name).detach()
        self._free = [place for place, x in enumerate(self._given) if x is None]
        self.fits: Callable[[], bool] = ModelState(model).unchanged

    @classmethod
    def loaded(
        cls, model: PreTrainedModel, file: Path, description: Mapping[str, Any]
    ) -> Step | None:
        """The step in a file; None: it cannot be loaded in this process."""
        try:
            return cls(model, Package(file), Signature(**description))
        except (RuntimeError, OSError, TypeError, AttributeError, KeyError, StopIteration):
            return None

    def run(self, own: Sequence[Tensor], cache: Cache | RowsCache) -> Any:
        """The model's output for `own`: contiguous token ids (B, 1), and positions if the program
        takes them, int64. None, with nothing changed: another thread is running the program, or
        the cache has other recurrent states."""
        tickets, states = cache.tickets, cache.carried.in_place()
        if states.keys() != {*self._states}:
            return None
        own = [*own, *map(states.__getitem__, self._states)]
        given = self._given.copy()
        for place, x in zip(self._free, self._inputs, strict=True):
            given[place] = own[x] if x >= 0 else tickets[-1 - x].number
        used = [tickets[-1 - x] for x in self._inputs if x < 0]
        found = run_program(self._program, given, used, cache)
        if found is None:
            return None
        with_cache = {} if self._cache_field is None else {self._cache_field: cache}
        return self._output(logits=found[self._logits], **with_cache)


def run_program(
    program: Program, given: Sequence[Tensor], tickets: Sequence[Ticket], cache: Any
) -> Sequence[Tensor] | None:
    """Run a program on a cache's layers and states. If it is interrupted, the states are unknown:
    see `RecurrentStates.require`."""
    carried = cache.carried
    before = carried.columns
    if carried:
        carried.change()
    found = program(given, tickets)
    carried.end(before if found is None else before + 1)
    return found


def is_compilable(model: PreTrainedModel) -> bool:
    """Whether a model may have programs: it is on the CPU, its weights are plain tensors or consist
    of plain tensors (torchao), and it has no PEFT adapters, which can be switched at any time."""
    adapted = any(hasattr(module, "base_layer") for module in model.modules())
    plain = all(is_plain(x) for weight in model.parameters() for _, x in parts(weight))
    return available and model.device.type == "cpu" and plain and not adapted


def key_of(model: PreTrainedModel) -> str | None:
    """The key of a model's programs, see `ModelState.key`; None: it cannot have programs."""
    return ModelState(model).key() if is_compilable(model) else None


def step_name(model: PreTrainedModel, given: Mapping[str, Tensor]) -> str | None:
    """The name of the program of a step, by its arguments; None: there can be no program."""
    key = key_of(model)
    return key and saved_steps.name_of(key, [*given], len(given["input_ids"]))


def programs_of(model: PreTrainedModel) -> list[Path]:
    """The programs on disk for steps of a model."""
    key = key_of(model) if saved_steps.files_of("*") else None
    return [] if key is None else saved_steps.files_of(key)


def _output_class(model: PreTrainedModel, name: str) -> Any:
    own = imported[type(model).__module__]
    return getattr(modeling_outputs, name, None) or getattr(own, name)
