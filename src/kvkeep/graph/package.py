"""Package: a decode step of a model as a program on disk, compiled by torch's AOTInductor.

A program takes token ids, positions and the tickets of layers, and reads the model's own weights.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from kvkeep.graph.compiled_library import CompiledLibrary
from kvkeep.graph.custom_ops import PreparedStep, Ticket
from kvkeep.graph.shims import SHIMS, connect, raised
from kvkeep.layer.decode.ready import RAISED, require_memory

_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}
if platform.machine() in ("x86_64", "AMD64"):
    _VECTOR_BITS["DEFAULT"] = 0


def compiler_options() -> dict[str, Any]:
    """Options of torch's compiler: skip the check, in each step, that operations return the
    declared shapes. The vector width is torch's own choice, but must be named: torch's disk cache
    would otherwise return code for another width, with wrong results."""
    return {
        "size_asserts": False,
        "alignment_asserts": False,
        "cpp.simdlen": _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability()),
    }


def compile_package(graph: nn.Module, inputs: Sequence[Tensor], path: Path) -> None:
    """Compile a graph to a file.

    Args:
        graph: a graph of `inputs`, which include the weights; later runs have the same shapes.
            Weights must not be constants: torch would compile the values of small weights into the
            program.
        path: file name ending in .pt2.
    """
    connect()
    options = compiler_options() | {
        # kvkeep's own threads run linear layers and attention. The other operations are small, and
        # torch's threaded code would fix the number of threads and could not raise errors.
        "cpp.threads": 1,
        "aot_inductor.custom_ops_to_c_shims": SHIMS,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch uses its own deprecated names
        exported = torch.export.export(graph, tuple(x.detach() for x in inputs), strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=options
        )


class Package:
    """A program loaded from disk. One thread at a time runs it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        connect()
        # Except on Windows, the files of a loaded program can be removed.
        with TemporaryDirectory(prefix="kvkeep-", ignore_cleanup_errors=True) as unpacked:
            with ZipFile(path) as archive:
                archive.extractall(unpacked)
            self._program = CompiledLibrary(next(Path(unpacked).rglob("*.so")))
        self._busy = Lock()

    def __call__(
        self,
        given: Sequence[Tensor],
        tickets: Sequence[Ticket],
    ) -> Sequence[Tensor] | None:
        """Run the program; return its results, or None, with nothing changed, if another thread is
        running it.

        Args:
            given: all inputs, in order.
            tickets: the tickets among the inputs.

        Raises:
            MemoryError: there is no scratch memory.
        """
        if not self._busy.acquire(blocking=False):
            return None
        ready: list[tuple[Ticket, PreparedStep]] = []
        with ExitStack() as ended:  # ends every step, even if one step raises
            ended.callback(self._busy.release)
            for ticket in tickets:
                step = ticket.prepare()
                if step is not None:
                    ready.append((ticket, step))
            for ticket, step in ready:
                ended.callback(_end, ticket, step)
                step.begin()
            raised()
            try:
                return self._program.run(given)
            except RuntimeError:
                if any(ticket.result == RAISED for ticket in tickets):
                    raise raised() or KeyboardInterrupt() from None
                for ticket, step in ready:
                    require_memory(ticket.result, step.count)
                raise


def _end(ticket: Ticket, step: PreparedStep) -> None:
    result = ticket.result
    ticket.clear(0)
    step.end(result)
