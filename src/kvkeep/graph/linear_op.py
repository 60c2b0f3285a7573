"""Linear layers and experts inside a compiled graph, by the native kernel where it is faster.

A graph's layers of the same input (queries, keys and values; gate and up) become one call of the
native kernel, so its cost per call and the wait for its threads are paid once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvkeep import native_library
from kvkeep.choice import is_slow, kernel_rows
from kvkeep.graph import custom_ops
from kvkeep.linears import Stored, Weights, grouped_product, readable, stored

_LINEARS = (torch.nn.functional.linear, torch._C._nn.linear)


@custom_ops.operator(
    "linears(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] scales) -> Tensor",
    lambda x, weights, *_: x.new_empty((*x.shape[:-1], sum(w.shape[0] for w in weights))),
)
def linears(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], scales: list[Tensor]
) -> Tensor:
    """x (..., inputs), times several weights (outputs, inputs): (..., all outputs).
    torch computes layers that the kernel does not support.

    Args:
        scales: the scales of each layer's int8 weights, or empty.
    """
    layers = [*map(Stored, weights, scales)] if scales else [*map(Stored, weights)]
    out = Weights.known(layers, biases, x.dtype).product(x)
    if out is None:
        plain = [w if s is None else (w * s.view(-1, 1)).to(x.dtype) for w, s in layers]
        pairs = zip(plain, biases, strict=True)
        return torch.cat([torch.nn.functional.linear(x, *pair) for pair in pairs], dim=-1)
    return out


def route_linears(graph: GraphModule, inputs: Sequence[Any]) -> int:
    """Replace a graph's linear layers without gradients by `kvkeep::linears`, one for all layers of
    an input, where the kernel is faster. Return the number of layers replaced; 0 without the native
    library.

    Args:
        inputs: the graph's inputs; the weights among them are read.
    """
    if not native_library.available or torch.is_grad_enabled():
        return 0
    given = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    layers: dict[tuple[Node, torch.dtype, bool], dict[Node, int]] = defaultdict(dict)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _LINEARS and _is_static(node):
            weight, bias = (given.get(x, value_of(x)) for x in (node.args[1], _bias(node)))
            found = stored(weight) if isinstance(weight, Tensor) else None
            if found is not None and readable(found, bias, weight.dtype):
                coded = found.scale is not None
                layers[node.args[0], weight.dtype, coded][node] = found.weight.nbytes
    count = 0
    for (x, dtype, coded), some in layers.items():
        rows = value_of(x).numel() // value_of(x).shape[-1]
        if kernel_rows(dtype, sum(some.values()), coded=coded)[(rows - 1).bit_length()]:
            _join(graph, x, list(some), coded)
            count += len(some)
    graph.graph.lint()
    graph.recompile()
    return count


def _join(graph: GraphModule, x: Node, layers: list[Node], coded: bool) -> None:
    weights: list[Any] = [layer.args[1] for layer in layers]
    rows = value_of(x).numel() // value_of(x).shape[-1]
    with graph.graph.inserting_before(layers[0]):
        read, scales = weights, list[Node]()
        if coded:
            read, scales = (
                [graph.graph.call_function(getattr, (weight, part)) for weight in weights]
                for part in ("qdata", "scale")
            )
        joined = graph.graph.call_function(
            linears, (x, read, [_bias(layer) for layer in layers], scales)
        )
        start = 0
        for layer, weight in zip(layers, weights, strict=True):
            outputs = value_of(weight).shape[0]
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


def _is_static(node: Node) -> bool:
    """Whether a linear layer has a fixed number of rows, at least one, and constant weights."""
    x, weight = (value_of(part) for part in node.args[:2])
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and node.args[1].op in ("placeholder", "get_attr")  # type: ignore[union-attr]
        and x.is_cpu
        and x.dtype is weight.dtype
        and isinstance(x.numel(), int)  # it may depend on data (language adapters, experts)
        and x.numel() > 0
    )


def _bias(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def value_of(node: Any) -> Any:
    """A node's symbolic tensor."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


_MOST_TOKENS = 256
"""Most tokens of all experts together; with more, torch's own operator may be faster."""


@custom_ops.operator(
    "grouped(Tensor x, Tensor weight, Tensor offs) -> Tensor",
    lambda x, weight, offs: x.new_empty((x.shape[0], weight.shape[2])),
)
def grouped(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The tokens `x[offs[e - 1] : offs[e]]` times the weight of expert e, for each e.

    Args:
        x: (S, inputs), ordered by expert.
        weight: (experts, inputs, outputs).
        offs: int32 or int64 (experts,), ascending. Results of later tokens are 0.

    Returns:
        (S, outputs).
    """
    ends = offs.tolist()
    found = grouped_product(x, weight.transpose(1, 2), ends)
    if found is not None:
        return found
    out = x.new_zeros((len(x), weight.shape[2]))
    dtype = torch.float32 if x.is_cpu and is_slow(x.dtype) else x.dtype
    for start, end, own in zip((0, *ends), ends, weight, strict=False):
        if end > start:
            out[start:end] = x[start:end].to(dtype) @ own.to(dtype)
    return out


def route_experts(graph: GraphModule) -> int:
    """Replace a graph's products of tokens and experts' weights, of few tokens, by
    `kvkeep::grouped`. Return the number of products replaced; 0 without the native library."""
    if not native_library.available or torch.is_grad_enabled():
        return 0
    found = [node for node in graph.graph.nodes if _is_product(node)]
    for node in found:
        x, weight, offs = (_argument(node, at) for at in range(3))
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(
                graph.graph.call_function(grouped, (x, weight, offs)), propagate_meta=True
            )
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return len(found)


_NAMES = (("input", "mat_a", "self"), ("weight", "mat_b", "mat2"), ("offs",))


def _argument(node: Node, at: int) -> Any:
    """A product's tokens (0), weights (1) or offsets (2)."""
    if at < len(node.args):
        return node.args[at]
    return next((node.kwargs[name] for name in _NAMES[at] if name in node.kwargs), None)


def _is_product(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or not name.endswith(("grouped_mm", "grouped_mm_fallback")):
        return False
    given = [_argument(node, at) for at in range(3)]
    x, weight, offs = (value_of(x) for x in given)
    rest = [*node.args[3:], *(y for name, y in node.kwargs.items() if name not in sum(_NAMES, ()))]
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and isinstance(offs, Tensor)
        and all(y is None for y in rest)
        and x.is_cpu
        and x.dim() == 2
        and weight.dim() == 3
        and x.dtype is weight.dtype
        and isinstance(x.shape[0], int)
        and x.shape[0] <= _MOST_TOKENS
    )
