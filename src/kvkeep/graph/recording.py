"""A compiled graph's calls, recorded in one step and repeated in the steps that follow.

The code that torch's compiler generates for the CPU is a list of calls: of kernels that it has
compiled, and of operators. The Python code around them takes longer than many of the calls. A
recording keeps the calls with their tensors, so repeating them computes the next step in the same
memory.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, get_ident
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep.graph import custom_ops
from kvkeep.graph.linear_op import linears
from kvkeep.graph.native_calls import NativeCall, NativeCalls
from kvkeep.graph.ready import Ready, Repeatable
from kvkeep.layer.step import StepInputs
from kvkeep.linears import Weights, multiply
from kvkeep.native_library import available

_KNOWN = frozenset(
    (
        "torch",
        "aten",
        "device",
        "extern_kernels",
        "empty_strided",
        "empty_strided_cpu",
        "inductor_ops",
        "reinterpret_tensor",
    )
)
"""What generated code may refer to besides its kernels: what makes tensors, and operators, which a
recorder is shown."""

_VARYING = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


_one_at_a_time = Lock()  # recordings


class Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `graph` becomes the compiled graph that is run: None if there was no operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph: CompiledFxGraph | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        frame = None if self.graph is not None else sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, CompiledFxGraph):
                self.graph = caller
            frame = frame.f_back
        return func(*args, **kwargs or {})


class _Call(NamedTuple):
    again: Callable[[], object]
    native: NativeCall | None = None  # the same call, for the library


class _Step(NamedTuple):
    call: int  # its index
    layer: int
    inputs: StepInputs
    out: Tensor


class Recording:
    """The calls of one run of a graph of a decode step, for caches of the same number of rows."""

    def __init__(self, given: Sequence[Tensor], tickets: Sequence[Tensor]) -> None:
        """`given`, `tickets`: the run's token ids and what else changes from run to run, and the
        tickets of its cache's layers."""
        self.complete = True  # whether all calls can be repeated
        self._given, self._result = given, given[0]
        self._layer_of = {id(ticket): layer for layer, ticket in enumerate(tickets)}
        self._calls: list[_Call] = []
        self._steps: list[_Step] = []
        self._native: NativeCalls | None = None
        self._layers: Sequence[Repeatable] = ()  # of the repetition under way
        self._ready: list[Ready | None] = []
        self._memory: set[int] = set()  # addresses of the recorded tensors' memory
        self._kept: list[Tensor] = []  # tensors that calls refer to by address
        self._threads, self._owner = torch.get_num_threads(), get_ident()
        self._busy = Lock()

    @classmethod
    def of(
        cls,
        graph: CompiledFxGraph,
        run: Callable[[], Tensor],
        given: Sequence[Tensor],
        tickets: Sequence[Tensor],
    ) -> tuple[Recording | None, Tensor]:
        """Run a graph and record its calls.

        Args:
            graph: the graph.
            run: runs it and returns the one of its results that is wanted.
            given: its inputs of token ids and positions; repetitions write theirs to this memory.
            tickets: of the layers, among its inputs.

        Returns:
            The recording, None if the graph has calls that cannot be repeated; and the result.
        """
        with _one_at_a_time:
            code = graph.current_callable
            function = getattr(code, "__func__", None)
            if not (isinstance(code, MethodType) and isinstance(function, FunctionType)):
                return None, run()
            names = function.__globals__
            kernels = {name for name, value in names.items() if _is_kernel(value)}
            called = {name for name in function.__code__.co_names if name in names}
            if not called <= kernels | _KNOWN:
                return None, run()
            recording = cls(given, tickets)
            recorded = names | {name: recording._kernel(names[name]) for name in kernels}
            again = FunctionType(function.__code__, recorded)
            graph.current_callable = MethodType(again, code.__self__)
            try:
                with _Recorder(recording):
                    recording._result = result = run()
            finally:
                graph.current_callable = code
            if available:
                recording._native = NativeCalls([call.native for call in recording._calls])
            own = result.untyped_storage().data_ptr() in recording._memory
            return recording if own and recording.complete else None, result.clone()

    @property
    def current(self) -> bool:
        """Whether torch's number of threads is what it was."""
        return self._threads == torch.get_num_threads()

    def repeat(self, given: Sequence[Tensor], layers: Sequence[Repeatable]) -> Tensor | None:
        """Make the calls again for these token ids, positions and layers, and return the result;
        None, with nothing changed, while another thread does."""
        if not self._busy.acquire(blocking=False):
            return None
        ready = self._ready
        try:
            for own, x in zip(self._given, given, strict=True):
                own.copy_(x)
            for step in self._steps:
                ready.append(layers[step.layer].prepare(step.inputs, step.out))
            for prepared in ready:
                if prepared is not None:
                    prepared.begin()
            self._layers = layers
            if self._native is None:
                for call in self._calls:
                    call.again()
            else:
                self._make(self._native)
            return self._result.clone()
        finally:
            self._layers = ()
            for prepared in ready:
                if prepared is not None:
                    prepared.end()
            ready.clear()
            self._busy.release()

    def _make(self, native: NativeCalls) -> None:
        """Make the calls: the library those that it can, the others from here."""
        waiting = deque[tuple[int, Ready]]()
        for step, ready in zip(self._steps, self._ready, strict=True):
            native.set_step(step.call, ready)
            if ready is not None:
                waiting.append((step.call, ready))
        at, end = 0, len(self._calls)
        while at < end:
            if self._calls[at].native is None:
                self._calls[at].again()
                at += 1
                continue
            for _, ready in waiting:
                ready.start()
            stopped, result = native.make(at, end)
            while waiting and waiting[0][0] < stopped:
                waiting.popleft()[1].finish(0)
            if stopped == end:
                return
            for _, ready in waiting:
                ready.start(False)
            self._make_alone(stopped, result, waiting)
            at = stopped + 1

    def _make_alone(self, at: int, result: int, waiting: deque[tuple[int, Ready]]) -> None:
        """Make a call from here that the library did not: `result` is what it returned."""
        call = self._calls[at]
        if waiting and waiting[0][0] == at:
            waiting.popleft()[1].finish(result)
        call.again()
        if call.native is not None and call.native.is_kernel:
            raise RuntimeError("a kernel of a compiled step failed, but not a second time")

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator's call, which has returned `out`."""
        if func is custom_ops.step:
            self._add_step(self._layer_of[id(args[0])], StepInputs(*args[1:]), out)
        elif func is custom_ops.fed:
            self._add_fed(self._layer_of[id(args[0])], out)
        elif func is custom_ops.next_positions:
            self._add_positions(self._layer_of[id(args[0])], args[1:], out)
        elif func is linears and (given := Weights.known(*args[1:]).arguments(args[0], out)):
            self._kept += (args[0], out)
            self._calls.append(_Call(partial(multiply, given), NativeCall.of_linears(given)))
        else:
            self._add_any(func, args, kwargs, out)
        self._note(out)

    def _add_any(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = (*args, *kwargs.values())
        if any(tag in func.tags for tag in _VARYING) or not isinstance(out, Tensor):
            self.complete = False
        elif func._schema.is_mutable:
            self.complete &= any(x is out for x in given)
            self._calls.append(_Call(partial(func, *args, **kwargs)))
        elif not func.is_view:  # a view remains one
            call = partial(func, *args, **kwargs)
            self._calls.append(_Call(lambda: out.copy_(call())))

    def _add_step(self, layer: int, inputs: StepInputs, out: Tensor) -> None:
        position = inputs.position
        assert position is not None
        # All rows have the same positions.
        inputs = inputs._replace(position=position[0])
        self._steps.append(_Step(len(self._calls), layer, inputs, out))
        again = partial(self._run_layer, layer, inputs, out)
        self._calls.append(_Call(again, NativeCall.of_step()))

    def _run_layer(self, layer: int, inputs: StepInputs, out: Tensor) -> None:
        out.copy_(self._layers[layer].run(inputs))

    def _add_fed(self, layer: int, out: Tensor) -> None:
        self._calls.append(_Call(lambda: out.fill_(self._layers[layer].fed)))

    def _add_positions(self, layer: int, given: tuple[Any, ...], out: Tensor) -> None:
        n, real, device = given
        self.complete &= real is None
        self._calls.append(_Call(lambda: out.copy_(self._layers[layer].next_positions(n, device))))

    def _kernel(self, kernel: Callable[..., object]) -> Callable[..., None]:
        """A kernel that also records its calls."""

        def recorded(*args: Any) -> None:
            kernel(*args)
            if get_ident() == self._owner:  # other threads may run the graph meanwhile
                native = NativeCall.of_kernel(kernel, args)
                self._calls.append(_Call(partial(kernel, *args), native))
                for x in args:
                    self._note(x)

        return recorded

    def _note(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self._memory.add(x.untyped_storage().data_ptr())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        self._recording.add(func, args, kwargs or {}, out)
        return out


def _is_kernel(value: object) -> bool:
    """Whether a name of generated code is a kernel that was compiled for it."""
    return isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
