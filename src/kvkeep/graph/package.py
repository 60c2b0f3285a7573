"""Package: a decode step of a model as a program on disk, compiled by torch's AOTInductor.

A program takes token ids, positions and the tickets of layers, and reads the model's own weights.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvkeep.graph.custom_ops import Ticket
from kvkeep.graph.shims import SHIMS, connect, raised
from kvkeep.layer.ready import RAISED, PreparedStep, require_memory

_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}
if platform.machine() in ("x86_64", "AMD64"):
    _VECTOR_BITS["DEFAULT"] = 0


def compiler_options() -> dict[str, Any]:
    """Options of torch's compiler: no checks in each step that operations return what they say. The
    width of vectors, which torch chooses alike by itself, is named because torch's cache on disk
    otherwise returns code for another width, whose results are wrong."""
    return {
        "size_asserts": False,
        "alignment_asserts": False,
        "cpp.simdlen": _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability()),
    }


class PreparedLayer(Protocol):
    """A layer whose steps a program makes."""

    @property
    def fed(self) -> int:
        """Columns fed."""

    def prepare(self) -> PreparedStep | None:
        """See `LayerCache.prepare`."""


def compile_package(graph: GraphModule, inputs: Sequence[Tensor], path: Path) -> None:
    """Compile a graph to a file.

    Args:
        graph: takes `inputs`, weights among them, whose shapes are those of all later runs. No
            weight is a constant: torch would compile the values of small ones into the program.
        path: of the file, ending in .pt2.
    """
    connect()
    options = compiler_options() | {
        # Linear layers and attention have threads of kvkeep's. What is left is small, and code for
        # several threads would be for one number of them, and could not raise errors.
        "cpp.threads": 1,
        "aot_inductor.custom_ops_to_c_shims": SHIMS,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of its names
        exported = torch.export.export(graph, tuple(x.detach() for x in inputs), strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=options
        )


class Package:
    """A program on disk, loaded. One thread runs it at a time.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        connect()
        # Torch would compile tests of the processor's vectors, for a second.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            self._program = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
        if self._program.get_constant_fqns():
            raise RuntimeError(f"{path} holds weights")
        self._busy = Lock()

    def run(
        self,
        given: Sequence[Tensor],
        tickets: Mapping[int, Ticket],
        layers: Sequence[PreparedLayer],
    ) -> Sequence[Tensor] | None:
        """The program's results; None, with nothing changed, while another thread runs it.

        Args:
            given: all its inputs, in order.
            tickets: by the layer, those among the inputs.
            layers: the layers.

        Raises:
            MemoryError: there is no scratch memory.
        """
        if not self._busy.acquire(blocking=False):
            return None
        ready: list[tuple[Ticket, PreparedStep]] = []
        with ExitStack() as ended:  # all of it, also if a step's end raises
            ended.callback(self._busy.release)
            for place, ticket in tickets.items():
                layer = layers[place]
                step = layer.prepare()
                ticket.prepare(layer.fed, step)
                if step is not None:
                    ready.append((ticket, step))
            for ticket, step in ready:
                ended.callback(_end, ticket, step)
                step.begin()
            raised()
            try:
                return cast(Sequence[Tensor], self._program.loader.boxed_run([*given]))
            except RuntimeError:
                if any(ticket.result == RAISED for ticket in tickets.values()):
                    raise raised() or KeyboardInterrupt() from None
                for ticket, step in ready:
                    require_memory(ticket.result, step.count)
                raise


def _end(ticket: Ticket, step: PreparedStep) -> None:
    result = ticket.result
    ticket.clear(0)
    step.end(result)
