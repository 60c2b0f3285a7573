"""Compiles decode steps of a model, by torch's compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch.fx import GraphModule
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.graph.custom_ops import Ticket
from kvkeep.graph.linear_op import route_linears
from kvkeep.graph.package import Package, PreparedLayer, compile_package, compiler_options
from kvkeep.hf import saved_steps
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import NAMES, as_cache
from kvkeep.hf.compiled import Program, Signature, Step, is_plain
from kvkeep.hf.config import changing_ropes
from kvkeep.hf.rows import RowsCache
from kvkeep.native_library import available

_MOST_GRAPHS = 32
"""Of a model: for each number of rows, and with its positions given or not."""

_log = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """What the inputs of a graph are.

    `places` are those of its weights, `weights` their names; `others` are the other inputs, see
    `Signature`.
    """

    places: list[int]
    weights: list[str]
    others: list[int]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        inputs: Sequence[Any],
        given: Sequence[Tensor],
        cache: Cache | RowsCache,
    ) -> Inputs | None:
        """Find them; None if the graph takes anything but token ids, positions, tickets and
        weights whose memory holds what they are."""
        found = cls([], [], [])
        layers = {id(ticket.number): layer for layer, ticket in enumerate(cache.tickets)}
        names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
        asked = {id(x): index for index, x in enumerate(given)}
        for place, x in enumerate(inputs):
            if id(x) in names and type(x) in (Tensor, nn.Parameter):
                found.places.append(place)
                found.weights.append(names[id(x)])
            elif id(x) in asked:
                found.others.append(asked[id(x)])
            elif id(x) in layers:
                found.others.append(-1 - layers[id(x)])
            else:
                return None
        return found if set(asked.values()) <= {*found.others} else None


class Run(NamedTuple):
    """A graph that has run: what computes it, its inputs, its results, and the file of its program
    if that was compiled to one."""

    program: Program
    inputs: Inputs
    found: Sequence[Any]
    file: Path | None


class Compiler:
    """Runs steps in graphs that it compiles.

    Args:
        model: the model.
        forward: its own forward.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self._model = model
        self._compiled = torch.compile(
            forward,
            backend=self._lower,
            fullgraph=True,
            dynamic=False,
            # Checking the attributes of every module takes a tenth of a step. Changes of weights
            # are noticed: they are arguments of the graph.
            options={"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe},
        )
        self._progress: Any = None
        self._given: dict[str, Tensor] = {}
        self._cache: Cache | RowsCache | None = None
        self._ran: Run | None = None

    def run(self, given: Mapping[str, Tensor], cache: Cache | RowsCache) -> tuple[Any, Step | None]:
        """The model's output for token ids (B, 1), and positions if given, and the step that
        computes further ones; None, with nothing changed, if there are too many graphs.

        Raises:
            UnsupportedError: torch cannot compile the step.
        """
        self._given = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items()
        }
        self._cache, self._ran = cache, None
        try:
            with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
                out = self._compiled(**self._given, **as_cache(self._model, cache), use_cache=True)
            return out, self._learn(out)
        except FailOnRecompileLimitHit:
            return None, None
        except (TorchDynamoException, InductorError) as error:
            lines = str(error).strip().splitlines()
            said = next((line for line in lines if not line.endswith("raised:")), lines[0])
            raise UnsupportedError(
                f"torch cannot compile a step of {type(self._model).__name__}: {said}; attach the "
                "model without compile=True"
            ) from error
        finally:
            self._given, self._cache, self._ran = {}, None, None
            self._close()

    def _lower(self, graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        """The backend: kvkeep's linear layers, then torch's own compiler. That runs when the graph
        first does, because a program cannot be compiled within torch.compile."""
        self._advance(1)
        route_linears(graph)
        lowered = None

        def run(*given: Any) -> Any:
            nonlocal lowered
            if lowered is None:
                packaged = self._package(graph, given)
                lowered = (
                    self._of_package(*packaged) if packaged else self._of_function(graph, given)
                )
                self._advance(2)
            return lowered(*given)

        return run

    def _inputs(self, inputs: Sequence[Any]) -> Inputs | None:
        assert self._cache is not None
        if changing_ropes(self._model.config):
            return None
        return Inputs.of(self._model, inputs, [*self._given.values()], self._cache)

    def _package(self, graph: GraphModule, inputs: Sequence[Any]) -> tuple[Package, Path] | None:
        """The graph as a program in a file; None: it cannot be one."""
        model, known = self._model, self._inputs(inputs)
        if known is None or not available or model.device.type != "cpu" or not is_plain(model):
            return None
        file = saved_steps.new_file(self._name())
        try:
            compile_package(copied(graph), inputs, file)
            return Package(file), file
        except Exception:  # of many kinds, and the graph can still run in this process
            _log.debug("a step of %s is no program", type(model).__name__, exc_info=True)
            file.unlink(missing_ok=True)
            return None

    def _name(self) -> str:
        given = self._given
        return saved_steps.name_of(self._model, [*given], len(given["input_ids"]))

    def _of_package(self, package: Package, file: Path) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            known = self._inputs(given)
            assert known is not None
            assert self._cache is not None
            tickets = self._cache.tickets
            used = {-1 - x: tickets[-1 - x] for x in known.others if x < 0}
            found = package.run([x.detach() for x in given], used, self._cache.layers)
            if found is None:
                raise RuntimeError("another thread runs the step that this one has just compiled")
            self._ran = Run(package, known, found, file if file.exists() else None)
            return found

        return run

    def _of_function(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowered: Any = compile_fx(graph, [*inputs], config_patches=compiler_options())

        def run(*given: Any) -> Any:
            found, known = lowered(*given), self._inputs(given)
            if known is not None:
                self._ran = Run(_Function(lowered), known, found, None)
            return found

        return run

    def _learn(self, out: Any) -> Step | None:
        """The step that has just run, kept on disk if it can be."""
        ran = self._ran
        if ran is None or set(out) - {"logits", *NAMES}:
            return None
        places = [place for place, x in enumerate(ran.found) if x is out.logits]
        if not places:
            return None
        weights, others = ran.inputs.weights, ran.inputs.others
        about = places[0], type(out).__name__
        signature = Signature(weights, ran.inputs.places, others, *about)
        if ran.file is not None:
            saved_steps.keep(ran.file, self._name(), signature._asdict())
        return Step(self._model, ran.program, signature)

    def _advance(self, stage: int) -> None:
        if self._progress is None:
            name = type(self._model).__name__
            self._progress = tqdm(
                total=2, desc=f"Compiling a step of {name}", disable=None, unit="stage"
            )
        self._progress.update(stage - self._progress.n)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None


class _Function:
    """A graph that torch has compiled for this process only. See `Program`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def run(
        self,
        given: Sequence[Tensor],
        tickets: Mapping[int, Ticket],
        layers: Sequence[PreparedLayer],
    ) -> Sequence[Tensor]:
        """See `Program`."""
        found: Sequence[Tensor] = self._function(*given)
        return found


def copied(graph: GraphModule) -> GraphModule:
    """A copy of a graph, of the same tensors."""
    return GraphModule(graph, deepcopy(graph.graph))
