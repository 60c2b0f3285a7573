"""Decode steps of an attached model in a compiled graph: `attach(model, compile=True)`.

A graph has one `kvkeep::step` for each layer and one `kvkeep::linears` for the linear layers of
each input; torch fuses the small operations between them. It serves all caches of the model.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter, is_
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch.fx import GraphModule
from torch.nn.functional import pad
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.graph.linear_op import route_linears
from kvkeep.graph.ready import Repeatable
from kvkeep.graph.recording import Finder, Recording
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import NAMES, as_cache, cache_in
from kvkeep.hf.config import changing_ropes
from kvkeep.hf.inputs import check_fed
from kvkeep.hf.rows import NUMBERS, RowsCache
from kvkeep.hf.weights import drops_weights
from kvkeep.host.packed import Packed

_KNOWN = frozenset(
    (
        "input_ids",
        *NAMES,
        "attention_mask",
        "position_ids",
        "cache_position",
        "logits_to_keep",  # there is one token
    )
)
_EXTRAS = ("output_attentions", "output_hidden_states")
_PLAIN = {"use_cache": True, "return_dict": True} | dict.fromkeys(_EXTRAS, False)
"""Arguments that do not change what a step computes, by their values."""

_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}
if platform.machine() in ("x86_64", "AMD64"):
    _VECTOR_BITS["DEFAULT"] = 0


def _options() -> dict[str, Any]:
    """Options of torch's compiler: no checks in each step that operations return what they say. The
    width of vectors, which torch chooses alike by itself, is named because torch's cache on disk
    otherwise returns code for another width, whose results are wrong."""
    width = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    return {"size_asserts": False, "alignment_asserts": False, "cpp.simdlen": width}


_MOST_GRAPHS = 32
"""Of a model: for each number of rows, and with its positions given or not."""

_ADDRESS, _DTYPE = torch._C.TensorBase.data_ptr, attrgetter("dtype")


def _own(ids: Tensor) -> Tensor:
    """A contiguous copy of a graph's token ids, in memory that the caller does not change."""
    return ids.clone(memory_format=torch.contiguous_format)


class CompiledSteps:
    """The `forward` of a model that is attached with `compile=True`.

    One token a row, without padding and gradients, through a kvkeep cache that holds a prompt, runs
    in a compiled graph. All other calls go to the model's own forward. The first step compiles,
    once for each number of rows; what was compiled is found again in torch's cache on disk.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._own: Callable[..., Any] = model.forward
        self.__signature__ = inspect.signature(self._own)  # which `generate` reads
        self._names = tuple(self.__signature__.parameters)
        self._compiled = torch.compile(
            self._own,
            backend=self._lower,
            fullgraph=True,
            dynamic=False,
            # Checking the attributes of every module takes a tenth of a step. Changes of weights
            # are noticed: they are arguments of the graph.
            options={"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe},
        )
        self._progress: Any = None
        self._ran: _Run | None = None
        self._known: dict[tuple[int, int], _Graph] = {}  # by the numbers of inputs and of rows
        self._rows: RowsCache | None = None
        self._packing = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self._model,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._own(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        cache = cache_in(given)
        if not isinstance(cache, Cache) or not self._fits(given, cache):
            return self._own(*args, **kwargs)
        ids = given["input_ids"]
        check_fed(self._model, {"input_ids": ids}, cache.fed)
        cache.begin(ids.shape[1])
        out = self._run({"input_ids": ids}, cache)
        return self._own(*args, **kwargs) if out is None else out

    def run_packed(self, tokens: Packed) -> Tensor | None:
        """The logits (sequences, V) of a packed forward of one token of each sequence; None, with
        nothing changed, if no graph can compute them."""
        count, config = len(tokens.last), self._model.config
        rows = next((number for number in NUMBERS if number >= count), None)
        if rows is None or tokens.ids.shape[1] > count or torch.is_grad_enabled():
            return None
        if drops_weights(self._model) or any(getattr(config, name, False) for name in _EXTRAS):
            return None
        if not self._packing.acquire(blocking=False):  # another thread packs sequences
            return None
        try:
            if self._rows is None:
                self._rows = RowsCache(config)
            self._rows.use(tokens.layers)
            given = {
                name: pad(x[0], (0, rows - count))[:, None]
                for name, x in (("input_ids", tokens.ids), ("position_ids", tokens.positions))
            }
            out = self._run(given, self._rows)
            return None if out is None else cast(Tensor, out.logits[:count, -1])
        finally:
            if self._rows is not None:
                self._rows.use([None] * len(self._rows))
            self._packing.release()

    def _run(self, given: dict[str, Tensor], cache: Cache | RowsCache) -> Any:
        """The model's output for token ids (B, 1), and positions if given; None, with nothing
        changed, if there are too many graphs."""
        try:
            # Tensors of inference mode would need a graph of their own.
            with torch.inference_mode(False), torch.no_grad():
                key = len(given), len(given["input_ids"])
                known = self._known.get(key)
                if known is not None:
                    if known.fits():
                        return known.run(list(given.values()), cache)
                    self._known.clear()
                given = {name: _own(x) for name, x in given.items()}
                with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
                    out = self._compiled(**given, **as_cache(self._model, cache), use_cache=True)
                self._learn(key, list(given.values()), cache, out)
                return out
        except FailOnRecompileLimitHit:
            return None
        except (TorchDynamoException, InductorError) as error:
            lines = str(error).strip().splitlines()
            said = next((line for line in lines if not line.endswith("raised:")), lines[0])
            raise UnsupportedError(
                f"torch cannot compile a step of {type(self._model).__name__}: {said}; attach the "
                "model without compile=True"
            ) from error
        finally:
            self._close()

    def _fits(self, given: dict[str, Any], cache: Cache) -> bool:
        """Whether a call is a step that the graph can compute."""
        ids, fed = given.get("input_ids"), cache.fed
        if not (isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1):
            return False
        if torch.is_grad_enabled() or drops_weights(self._model) or not cache.compiles:
            return False
        mask, config = given.get("attention_mask"), self._model.config
        if mask is not None and not (
            isinstance(mask, Tensor)
            and mask.dim() == 2
            and mask.shape[1] in (1, fed + 1)
            and bool(mask.all())
        ):
            return False
        for name in ("position_ids", "cache_position"):
            place = given.get(name)
            if place is not None and not (isinstance(place, Tensor) and bool((place == fed).all())):
                return False
        return all(
            name in _KNOWN or value is None or value == _PLAIN.get(name, _PLAIN)
            for name, value in given.items()
        ) and not any(getattr(config, name, False) for name in _EXTRAS)

    def _lower(self, graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        """The backend: kvkeep's linear layers, then torch's own compiler."""
        self._advance(1)
        route_linears(graph)
        lowered: Any = compile_fx(graph, inputs, config_patches=_options())
        self._advance(2)

        finder = Finder()

        def run(*given: Any) -> Any:
            with nullcontext() if finder.graph else finder:
                found = lowered(*given)
            self._ran = _Run(lowered, finder.graph, given, found)
            return found

        return run

    def _learn(
        self, key: tuple[int, int], given: Sequence[Tensor], cache: Cache | RowsCache, out: Any
    ) -> None:
        """Prepare to call the graph that has just run directly."""
        ran, self._ran = self._ran, None
        graph = None if ran is None else _Graph.of(self._model, ran, given, cache, out)
        if graph is not None:
            self._known[key] = graph

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


class _Run(NamedTuple):
    """A run of a graph that torch has compiled."""

    function: Callable[..., Any]
    graph: CompiledFxGraph | None  # which `function` runs; None: unknown
    given: tuple[Any, ...]
    found: Sequence[Any]


class _Graph:
    """A compiled graph of a step, called without torch's checks and reconstruction around it; and
    recorded, so that the generated code itself runs once."""

    def __init__(self, model: PreTrainedModel, ran: _Run, kind: type) -> None:
        self._model, self._kind = model, kind
        self._function, self._given = ran.function, list(ran.given)
        self._graph = ran.graph  # None: it cannot be recorded
        self._recording: Recording | None = None
        self._cache_field = ""  # of the model's output
        self._places: list[int] = []  # of token ids and positions among the inputs
        self._logits = 0
        self._tickets: list[tuple[int, int]] = []  # (place among the inputs, layer)
        self._weights: list[Tensor] = []
        self._owners: list[dict[str, Any]] = []  # of modules, which have them
        self._names: list[str] = []  # there
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype] = []

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        ran: _Run,
        given: Sequence[Tensor],
        cache: Cache | RowsCache,
        out: Any,
    ) -> _Graph | None:
        """The graph, after one of its runs; None if it takes or gives anything but token ids,
        positions, tickets, weights and logits.

        Args:
            ran: the run.
            given, cache, out: the inputs and the output of the model.
        """
        if changing_ropes(model.config) or set(out) - {"logits", *NAMES}:
            return None
        graph = cls(model, ran, type(out))
        graph._cache_field = next(name for name in NAMES if name in [*out])
        layers = {id(ticket.number): layer for layer, ticket in enumerate(cache.tickets)}
        owned = {
            id(x): (owner, name)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for name, x in owner.items()
            if x is not None
        }
        asked = {id(x): index for index, x in enumerate(given)}
        places = dict.fromkeys(range(len(given)), -1)
        for place, x in enumerate(ran.given):
            if id(x) in asked:
                places[asked[id(x)]] = place
            elif id(x) in layers:
                graph._tickets.append((place, layers[id(x)]))
            elif id(x) in owned:
                graph._hold(x, *owned[id(x)])
            else:
                return None
        results = [place for place, x in enumerate(ran.found) if x is out.logits]
        if not results or -1 in places.values():
            return None
        graph._logits, graph._places = results[0], list(places.values())
        for place in (*graph._places, *(place for place, _ in graph._tickets)):
            graph._given[place] = None
        return graph

    def _hold(self, weight: Tensor, owner: dict[str, Any], name: str) -> None:
        self._weights.append(weight)
        self._owners.append(owner)
        self._names.append(name)
        self._addresses.append(weight.data_ptr())
        self._dtypes.append(weight.dtype)

    def fits(self) -> bool:
        """Whether the model has the weights and the mode that the graph was made for."""
        held = self._weights
        # A few C calls for each weight: Python would take a twentieth of a step.
        return (
            not self._model.training
            and not torch.is_autocast_enabled(self._model.device.type)
            and all(map(is_, map(dict.get, self._owners, self._names), held))
            and list(map(_ADDRESS, held)) == self._addresses
            and list(map(_DTYPE, held)) == self._dtypes
        )

    def run(self, own: Sequence[Tensor], cache: Cache | RowsCache) -> Any:
        """The model's output for token ids (B, 1), and positions."""
        recording = self._recording
        logits = None
        if recording is not None and recording.current:
            logits = recording.repeat(own, cast(Sequence[Repeatable], cache.layers))
        if logits is None:
            logits = self._run_graph(own, cache)
        return self._kind(logits=logits, **{self._cache_field: cache})

    def _run_graph(self, own: Sequence[Tensor], cache: Cache | RowsCache) -> Tensor:
        """The logits by the graph, which is recorded unless that was done or is impossible."""
        given, numbers = self._given.copy(), [ticket.number for ticket in cache.tickets]
        own = [_own(x) for x in own]
        for place, x in zip(self._places, own, strict=True):
            given[place] = x
        for place, layer in self._tickets:
            given[place] = numbers[layer]

        def run() -> Tensor:
            found: Tensor = self._function(*given)[self._logits]
            return found

        known = self._recording
        if self._graph is None or (known is not None and known.current):
            return run()
        self._recording, logits = Recording.of(self._graph, run, own, numbers)
        if self._recording is None:
            self._graph = None
        return logits
