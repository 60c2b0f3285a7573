"""Compiles decode steps of a model with torch's compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import GraphModule
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.graph.custom_ops import next_positions
from kvkeep.graph.linear_op import route_experts, route_linears
from kvkeep.graph.package import Package, compile_package, compiler_options
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import NAMES, as_cache, cache_in
from kvkeep.hf.config import changing_ropes
from kvkeep.hf.forward.packed import RowsCache
from kvkeep.hf.forward.placing import first_position, takes_positions
from kvkeep.hf.steps import saved_steps
from kvkeep.hf.steps.step import Program, Signature, Step, run_program, step_name
from kvkeep.hf.weight_parts import Joining, is_plain, parts

_MOST_GRAPHS = 32
"""The most graphs of a model: one for each number of rows, with and without positions."""

_NOT_COMPILED = (
    *(TorchDynamoException, InductorError),
    *(DataDependentOutputException, DynamicOutputShapeException),
)

_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A graph that has run: its program, its signature, its results, and the contents of the
    program's file if the program was compiled in this run."""

    program: Program
    signature: Signature
    found: Sequence[Any]
    content: bytes | None


class Compiler:
    """Compiles the graphs of steps, and runs them.

    Args:
        model: the model.
        forward: the model's own forward.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self._model = model

        def told(**given: Any) -> Any:
            ids, cache = given["input_ids"], cast(Cache | RowsCache, cache_in(given))
            position = cache.tickets[0].next_positions(ids.shape[1], ids.device)
            asked = {"position_ids": position.to(torch.int64) + first} if takes else {}
            return forward(**given, attention_mask=position[:, None, None], **asked)

        first, takes = first_position(model), takes_positions(model)
        self._plain, self._told = self._compiled(forward), self._compiled(told)
        # Whether to give positions and a mask, without which models that count positions in Python,
        # or make masks from the number of columns, cannot be compiled.
        self._tells = False
        self._progress: Any = None
        self._given: dict[str, Tensor] = {}
        self._cache: Cache | RowsCache | None = None
        self._ran: Run | None = None

    def run(self, given: Mapping[str, Tensor], cache: Cache | RowsCache) -> tuple[Any, Step | None]:
        """The model's output for token ids (B, 1), and positions if given; and the step, for later
        calls, if it can be reused. Both None, with nothing changed: there are too many graphs.

        Raises:
            UnsupportedError: torch cannot compile the step.
        """
        if "position_ids" in given:
            return self._run(self._plain, given, cache)
        if not self._tells:
            try:
                return self._run(self._plain, given, cache)
            except UnsupportedError:
                self._tells = True
        return self._run(self._told, given, cache)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(
            forward,
            backend=self._lower,
            fullgraph=True,
            dynamic=False,
            # Guards on the attributes of every module would take a tenth of a step. Weights need no
            # guards: they are arguments of the graph.
            options={"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe},
        )

    def _run(
        self, way: Callable[..., Any], given: Mapping[str, Tensor], cache: Cache | RowsCache
    ) -> tuple[Any, Step | None]:
        self._given = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items()
        }
        self._cache, self._ran = cache, None
        for x in cache.carried.in_place().values():
            # Otherwise the graph would treat this cache's state as a constant address.
            vars(x).pop("_dynamo_static_input_type", None)
        try:
            limit = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS)
            with limit, _undeclared(self._model):
                out = way(**self._given, **as_cache(self._model, cache), use_cache=True)
            return out, self._learn(out)
        except FailOnRecompileLimitHit:
            return None, None
        except _NOT_COMPILED as error:
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
        """The backend of torch.compile: kvkeep's linear layers, then torch's own compiler. The
        latter runs at the graph's first run, because programs cannot be compiled within
        torch.compile."""
        self._advance(1)
        lowered = None

        def run(*given: Any) -> Any:
            nonlocal lowered
            if lowered is None:
                self._require_unmasked(graph)
                route_linears(graph, given)
                route_experts(graph)
                lowered = self._runs(graph, given)
                self._advance(2)
            return lowered(*given)

        return run

    def _require_unmasked(self, graph: GraphModule) -> None:
        """Raise UnsupportedError if the model makes its own mask, because programs use no mask."""
        made = graph.graph.find_nodes(op="call_function", target=next_positions)
        if any(node.args[2] is not None for node in made):
            raise UnsupportedError(
                f"a step of {type(self._model).__name__} makes its own mask, which a compiled step "
                "does not use; attach the model without compile=True"
            )

    def _signature(self, inputs: Sequence[Any]) -> Signature | None:
        """The signature of a graph; None: an input is not a token id tensor, a position tensor, a
        recurrent state, a ticket, or a plain weight."""
        assert self._cache is not None
        model = self._model
        if changing_ropes(model.config):
            return None
        states = self._cache.carried.tensors()
        known = Signature([], [], [], states=[*states])
        layers = {id(ticket.number): layer for layer, ticket in enumerate(self._cache.tickets)}
        weights = (*model.named_parameters(), *model.named_buffers())
        names = {id(x): name for of, whole in weights for name, x in parts(whole, of)}
        own = [*self._given.values(), *states.values()]
        asked = {id(x): index for index, x in enumerate(own)}
        for place, x in enumerate(inputs):
            if id(x) in names and is_plain(x):
                known.places.append(place)
                known.weights.append(names[id(x)])
            elif id(x) in asked:
                known.inputs.append(asked[id(x)])
            elif id(x) in layers:
                known.inputs.append(-1 - layers[id(x)])
            else:
                return None
        return known if set(asked.values()) <= {*known.inputs} else None

    def _package(self, graph: GraphModule, inputs: Sequence[Any]) -> tuple[Package, bytes] | None:
        """The graph as a program, with its file's contents; None: it cannot become a program."""
        plain = _plain(inputs)
        if self._signature(plain) is None or step_name(self._model, self._given) is None:
            return None
        try:
            with TemporaryDirectory(prefix="kvkeep-") as place:
                file = Path(place) / "step.pt2"
                copied = GraphModule(graph, deepcopy(graph.graph))
                compile_package(Joining(copied, inputs), plain, file)
                return Package(file), file.read_bytes()
        except Exception:  # torch raises many types; the graph can still run in this process
            kind = type(self._model).__name__
            _log.debug("a step of %s is no program", kind, exc_info=True)
            return None

    def _runs(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        program: Program
        content: bytes | None
        packaged = self._package(graph, inputs)
        if packaged is None:
            own: Any = compile_fx(graph, [*inputs], config_patches=compiler_options())
            program, content = (lambda given, *_: own(*given)), None
        else:
            program, content = packaged

        def run(*given: Any) -> Any:
            assert self._cache is not None
            nonlocal content
            if packaged is not None:
                given = _plain(given)
            signature, tickets = self._signature(given), self._cache.tickets
            assert signature is not None or packaged is None  # a program needs its tickets
            used = [tickets[-1 - x] for x in signature.inputs if x < 0] if signature else []
            # A model that torch splits is given the mesh of its processes too.
            detached = [x.detach() if isinstance(x, Tensor) else x for x in given]
            found = run_program(program, detached, used, self._cache)
            if found is None:
                raise RuntimeError("another thread is running the step that was just compiled")
            if signature is not None:
                self._ran, content = Run(program, signature, found, content), None
            return found

        return run

    def _learn(self, out: Any) -> Step | None:
        """The step that has just run, or None if it cannot be reused. If it is a program, it is
        saved to disk."""
        ran = self._ran
        if ran is None or set(out) - {"logits", *NAMES}:
            return None
        places = [place for place, x in enumerate(ran.found) if x is out.logits]
        if not places:
            return None
        signature = ran.signature._replace(logits=places[0], output=type(out).__name__)
        name = None if ran.content is None else step_name(self._model, self._given)
        if ran.content is not None and name is not None:
            saved_steps.keep(ran.content, name, signature._asdict())
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


@contextmanager
def _undeclared(model: nn.Module) -> Iterator[None]:
    """A context in which buffers declared by `nn.Buffer` are plain tensors, because torch's
    compiler cannot trace a forward that assigns a declared buffer again."""
    declared: list[Any] = [x for x in model.buffers() if isinstance(x, nn.Buffer)]
    for x in declared:
        del x._is_buffer
    try:
        yield
    finally:
        for x in declared:
            x._is_buffer = True


def _plain(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a graph; tensors that consist of other tensors are replaced by their parts."""
    return tuple(x for given in inputs for _, x in parts(given))
