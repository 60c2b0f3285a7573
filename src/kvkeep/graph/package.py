"""Package: a decode step of a model as a program on disk, compiled by torch's AOTInductor.

A program takes token ids, positions and the tickets of layers, and reads the model's own weights.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvkeep.graph.custom_ops import Ticket
from kvkeep.graph.shims import SHIMS, connect, raised
from kvkeep.layer.ready import PreparedStep, require_memory

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


def weight_name(index: int) -> str:
    """The name of a weight in a program."""
    return f"weight{index}"


def compile_package(
    graph: GraphModule, inputs: Sequence[Tensor], weights: Sequence[int], path: Path
) -> None:
    """Compile a graph to a file.

    Args:
        graph: takes `inputs`, whose shapes are those of all later runs.
        weights: which of the inputs are weights, which `Package.bind` gives later.
        path: of the file, ending in .pt2.
    """
    connect()
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, place in enumerate(weights):
        name, node = weight_name(index), places[place]
        graph.register_buffer(name, inputs[place].detach())
        with graph.graph.inserting_before(node):
            held = graph.graph.get_attr(name)
        held.meta.update(node.meta)
        node.replace_all_uses_with(held)
        graph.graph.erase_node(node)
    graph.recompile()
    bound = set(weights)
    others = tuple(x for place, x in enumerate(inputs) if place not in bound)
    options = compiler_options() | {
        # Linear layers and attention have threads of kvkeep's. What is left is small, and code for
        # several threads would be for one number of them, and could not raise errors.
        "cpp.threads": 1,
        "aot_inductor.custom_ops_to_c_shims": SHIMS,
        "aot_inductor.package_constants_in_so": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of its names
        exported = torch.export.export(graph, others, strict=False)
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
        self._wanted: list[str] = self._program.get_constant_fqns()
        self._busy = Lock()

    def bind(self, weights: Sequence[Tensor]) -> None:
        """Let the program read these tensors where they lie. The caller keeps them."""
        known = {weight_name(index): x.detach() for index, x in enumerate(weights)}
        self._program.load_constants(
            {name: known[name] for name in self._wanted}, check_full_update=True, user_managed=True
        )

    def run(
        self,
        given: Sequence[Tensor],
        tickets: Mapping[int, Ticket],
        layers: Sequence[PreparedLayer],
    ) -> Sequence[Tensor] | None:
        """The program's results; None, with nothing changed, while another thread runs it.

        Args:
            given: its inputs, in order.
            tickets: by the layer, those among the inputs.
            layers: the layers.

        Raises:
            MemoryError: there is no scratch memory.
        """
        if not self._busy.acquire(blocking=False):
            return None
        ready: list[tuple[Ticket, PreparedStep]] = []
        try:
            for place, ticket in tickets.items():
                layer = layers[place]
                step = layer.prepare()
                ticket.prepare(layer.fed, step)
                if step is not None:
                    ready.append((ticket, step))
            for _, step in ready:
                step.begin()
            return self._call(given, ready)
        finally:
            for ticket, step in ready:
                step.end(ticket.result)
                ticket.prepare(0, None)
            self._busy.release()

    def _call(
        self, given: Sequence[Tensor], ready: Sequence[tuple[Ticket, PreparedStep]]
    ) -> Sequence[Tensor]:
        raised()
        try:
            return cast(Sequence[Tensor], self._program.loader.boxed_run([*given]))
        except RuntimeError:
            error = raised()
            if error is not None:
                raise error from None
            for ticket, step in ready:
                require_memory(ticket.result, step.count)
            raise
