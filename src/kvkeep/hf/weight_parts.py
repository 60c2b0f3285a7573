"""The plain tensors of which a model's weights consist. A weight quantised by torchao is a tensor
object that holds several plain tensors: codes and scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_joined(x: object) -> bool:
    """Whether a tensor consists of other tensors."""
    return isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)


def is_plain(x: object) -> bool:
    """Whether a tensor is of torch's own class, so that its memory holds its elements."""
    return type(x) in (Tensor, nn.Parameter)


def parts(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of which a tensor consists, each after `name` and its path of attributes
    (`weight.qdata`); a plain tensor alone."""
    if not is_joined(x):
        yield name, x
        return
    for inner in x.__tensor_flatten__()[0]:
        yield from parts(getattr(x, inner), f"{name}.{inner}")


def part_named(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of a model, or a part of it.

    Raises:
        KeyError: no tensor has this name.
    """
    found: Any = model
    for part in name.split("."):
        if isinstance(found, nn.Module):
            owners = (found._modules, found._parameters, found._buffers)
            found = next((own[part] for own in owners if own.get(part) is not None), None)
        else:
            found = getattr(found, part, None)
    if not isinstance(found, Tensor):
        raise KeyError(name)
    return found


class Joining(nn.Module):
    """A graph that takes the parts of its inputs.

    Args:
        graph: the graph.
        inputs: the inputs with which it was traced.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph, self._inputs = graph, inputs

    def forward(self, *given: Tensor) -> Any:
        """The graph's results, for the parts of all inputs in order."""
        plain = iter(given)
        return self.graph(*[_joined(like, plain) for like in self._inputs])


def _joined(like: Any, plain: Iterator[Tensor]) -> Any:
    if not is_joined(like):
        return next(plain)
    names, context = like.__tensor_flatten__()
    inner = {name: _joined(getattr(like, name), plain) for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
