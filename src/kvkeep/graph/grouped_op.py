"""Linear layers of experts inside a compiled graph: the native kernel multiplies each token with
the weights of its experts, and reads no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvkeep import native_library
from kvkeep.graph.custom_ops import define_operator
from kvkeep.graph.linear_op import value_of
from kvkeep.linears import MOST_ROWS, Stored, few_rows, readable

_MOST_TOKENS = 8 * MOST_ROWS
"""Most tokens of all experts together; with more, torch's own operator may be faster."""


def _grouped(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The tokens `x[offs[e - 1] : offs[e]]` times the weight of expert e, for each e.

    Args:
        x: (S, inputs), ordered by expert.
        weight: (experts, inputs, outputs).
        offs: int32 or int64 (experts,), ascending. Results of later tokens are 0.

    Returns:
        (S, outputs).
    """
    out = x.new_zeros((len(x), weight.shape[2]))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        own = weight[expert].T
        reads = readable(Stored(own), None, x.dtype)
        multiply = few_rows if reads else torch.nn.functional.linear
        for first in range(start, end, MOST_ROWS):
            rows = slice(first, min(end, first + MOST_ROWS))
            out[rows] = multiply(x[rows], own)
        start = end
    return out


def _fake(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


grouped = define_operator(
    "grouped(Tensor x, Tensor weight, Tensor offs) -> Tensor", _grouped, _fake
)


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
