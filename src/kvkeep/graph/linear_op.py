"""Linear layers of few rows inside a compiled graph: one operation for all layers of an input.

A graph's layers of the same input (queries, keys and values; gate and up) become one call of the
native kernel, so its cost per call and the wait for its threads are paid once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvkeep import native_library
from kvkeep.graph.custom_ops import define_operator
from kvkeep.linears import FEWEST_BYTES, MOST_ROWS, Weights, readable

_LINEARS = (torch.nn.functional.linear, torch._C._nn.linear)


def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """x (..., inputs), of few rows, times several weights (outputs, inputs): (..., all outputs).
    Layers that the kernel does not support are computed by torch."""
    out = Weights.known(weights, biases).product(x)
    if out is None:
        pairs = zip(weights, biases, strict=True)
        return torch.cat([torch.nn.functional.linear(x, *pair) for pair in pairs], dim=-1)
    return out


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


linears = define_operator(
    "linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor", _linears, _fake
)


def route_linears(graph: GraphModule) -> int:
    """Replace a graph's linear layers of few rows and without gradients by `kvkeep::linears`, one
    for all layers of an input. Return the number of layers replaced; 0 without the native
    library."""
    if not native_library.available or torch.is_grad_enabled():
        return 0
    inputs: dict[tuple[Node, torch.dtype], list[Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _LINEARS and _gains(node):
            inputs[node.args[0], _value(node.args[1]).dtype].append(node)
    for (x, _), layers in inputs.items():
        _join(graph, x, layers)
    graph.graph.lint()
    graph.recompile()
    return sum(map(len, inputs.values()))


def _join(graph: GraphModule, x: Node, layers: list[Node]) -> None:
    weights = [layer.args[1] for layer in layers]
    rows = _value(x).numel() // _value(x).shape[-1]
    with graph.graph.inserting_before(layers[0]):
        joined = graph.graph.call_function(
            linears, (x, weights, [_bias(layer) for layer in layers])
        )
        start = 0
        for layer, weight in zip(layers, weights, strict=True):
            outputs = _value(weight).shape[0]
            out = joined
            if len(layers) > 1:
                own: Any = (..., slice(start, start + outputs))
                out = graph.graph.call_function(operator.getitem, (joined, own))
                if rows > 1:  # make it contiguous like a layer's output, for later views
                    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
                    out = graph.graph.call_function(torch.clone, (out,), dense)
            start += outputs
            layer.replace_all_uses_with(out)
            out.meta.update(layer.meta)
    for layer in layers:
        graph.graph.erase_node(layer)


def _gains(node: Node) -> bool:
    x, weight, bias = (_value(part) for part in (*node.args[:2], _bias(node)))
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and node.args[1].op in ("placeholder", "get_attr")  # type: ignore[union-attr]
        and x.is_cpu
        and x.dtype is weight.dtype
        and isinstance(x.numel(), int)  # it may depend on data (language adapters, experts)
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and weight.nbytes >= FEWEST_BYTES
        and readable(weight, bias)
    )


def _bias(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _value(node: Any) -> Any:
    """A node's symbolic tensor."""
    return node.meta.get("example_value") if isinstance(node, Node) else None
