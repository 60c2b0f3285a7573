"""Check that the parts of a loaded program agree: header, layers, their state, and the shapes that
its operators return. Nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true

from kvkeep.geometry import Geometry
from kvkeep.graph.export_op import Description, described, require_exportable
from kvkeep.planes import POSITION
from kvkeep.spec import CacheSpec

_OF_LAYERS = (torch.ops.kvkeep.step_in.default, torch.ops.kvkeep.read_in.default)
_PLACEHOLDER, _COUNTS, _PADS = "placeholder", "counts", "pads"


def require_consistent(
    traced: ExportedProgram, specs: Sequence[str], rows: int, room: int, vocabulary: int
) -> None:
    """Raise ValueError, or an error of kvkeep or torch, unless the parts of a program agree.

    Args:
        specs, rows, room, vocabulary: see `kvkeep.graph.program.Header`.
    """
    inputs = [name for name in traced.graph_signature.user_inputs if isinstance(name, str)]
    values = {node.name: node.meta["val"] for node in traced.graph.nodes if node.op == _PLACEHOLDER}
    shapes = [tuple(values[name].shape) for name in inputs]
    if len(shapes) != 2 or any(len(shape) != 2 or shape[0] != rows for shape in shapes):
        raise ValueError(f"its inputs are {shapes}, but its header says {rows} rows")
    if room < 1 or vocabulary < 1:
        raise ValueError(f"it has room for {room} tokens and a vocabulary of {vocabulary}")
    layers = list(_layers(traced))
    _require_readings(traced)
    if [description.spec for description, _ in layers] != list(specs):
        raise ValueError("the specs in its header differ from those of its layers")
    for index, (description, state) in enumerate(layers):
        _require_state(index, description, state, room)
    if len({int(state[_COUNTS][0]) for _, state in layers}) != 1:
        raise ValueError("its layers were fed different numbers of tokens")
    _require_shapes(traced)


def _layers(traced: ExportedProgram) -> Iterator[tuple[Description, Mapping[str, Tensor]]]:
    """Each layer's description and state tensors, whose shapes and dtypes match it."""
    buffers = traced.graph_signature.inputs_to_buffers
    for node in traced.graph.nodes:
        if node.target is not torch.ops.kvkeep.step_in.default:
            continue
        state, text, _, k, v = node.args[:5]
        description, names = described(text)
        spec = CacheSpec.parse(description.spec)
        require_exportable(spec)
        geometry = Geometry.of(k.meta["val"], v.meta["val"])
        expected = description.tensors(description.build(), geometry)
        planes = list(expected)[:-2]
        if names != planes or len(state) != len(expected):
            raise ValueError(f"a layer has the planes {names}, but {spec} has {planes}")
        found = {}
        for part, (name, (shape, dtype)) in zip(state, expected.items(), strict=True):
            x = found[name] = traced.state_dict[buffers[_source(part)]]
            if tuple(x.shape) != shape or x.dtype != dtype:
                raise ValueError(
                    f"{name} of a layer is {tuple(x.shape)} {x.dtype}, not {shape} {dtype}"
                )
        yield description, found


def _require_readings(traced: ExportedProgram) -> None:
    """Raise ValueError unless each reading follows a step of its layer, and has its state."""
    stepped = []
    for node in traced.graph.nodes:
        if node.target in _OF_LAYERS:
            state, text = node.args[:2]
            layer = text, [_source(part) for part in state]
            if node.target is torch.ops.kvkeep.step_in.default:
                stepped.append(layer)
            elif layer not in stepped:
                raise ValueError(f"{node.name} reads a layer that has made no step")


def _source(node: Node) -> str:
    """The name of the input that a state tensor is, or is copied from on the same device."""
    while node.op != _PLACEHOLDER:
        node = node.args[0]  # type: ignore[assignment]
    return node.name


def _require_state(
    index: int, description: Description, state: Mapping[str, Tensor], room: int
) -> None:
    columns, floor, slots = state[_COUNTS].tolist()
    pads, position = state[_PADS], state[POSITION]
    held = position[:, :, :slots] if 0 <= slots <= position.shape[2] else None
    if held is None or not (0 <= floor <= columns <= room and slots <= columns):
        raise ValueError(
            f"layer {index} was fed {columns} tokens of {room}, has a floor of {floor} and holds "
            f"{slots} slots of {description.capacity}"
        )
    if not 0 <= int(pads.min()) <= int(pads.max()) <= columns:
        raise ValueError(f"layer {index} has padding of {pads.tolist()[:8]} in {columns} columns")
    if held.numel() and not -1 <= int(held.min()) <= int(held.max()) < columns:
        raise ValueError(f"layer {index} holds positions beyond the {columns} tokens fed")


def _require_shapes(traced: ExportedProgram) -> None:
    """Raise unless every operator, on tensors without content, returns the recorded shapes."""
    graph = traced.graph_module
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == _PLACEHOLDER]
    mode = detect_fake_mode(given)
    assert mode is not None
    try:
        with mode, torch.no_grad():
            _Compared(graph).run(*given)
    except GuardOnDataDependentSymNode:  # the rest depends on the content of a tensor
        return


class _Compared(Interpreter):
    """Runs a graph and compares the shape and dtype of each tensor with the recorded ones."""

    def run_node(self, n: Node) -> Any:
        result, recorded = super().run_node(n), n.meta.get("val")
        if isinstance(result, Tensor) and isinstance(recorded, Tensor):
            fits = result.dtype == recorded.dtype and result.dim() == recorded.dim()
            if not fits or any(
                statically_known_true(a != b)
                for a, b in zip(result.shape, recorded.shape, strict=True)
            ):
                raise ValueError(
                    f"{n.name} is {tuple(result.shape)} {result.dtype}, not "
                    f"{tuple(recorded.shape)} {recorded.dtype}"
                )
        return result
