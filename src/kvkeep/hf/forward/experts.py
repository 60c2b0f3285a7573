"""Experts of transformers models: tokens are sorted by expert, and one operation computes the
products with all experts' weights.

Some models loop over the experts which tokens have chosen. The length of this loop depends on data,
so graphs cannot contain it; there, these models sort tokens instead. Outside graphs all models do,
where the native kernel multiplies faster than torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvkeep import native_library
from kvkeep.checks import wants_gradients
from kvkeep.choice import is_slow
from kvkeep.graph.linear_op import grouped
from kvkeep.hf.kinds.base import Handle, Replaced


def _usual(module: Any, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    """A class with transformers' `use_experts_implementation`, which sets `has_gate` and more."""

    def times(name: str, x: Tensor) -> Tensor:
        weight = getattr(module, name)
        found = grouped(x, weight if module.is_transposed else weight.mT, ends)
        if module.has_bias:
            found = found + getattr(module, f"{name}_bias")[experts]
        return cast(Tensor, found)

    if module.has_gate:
        made = module._apply_gate(times("gate_up_proj", x))
    else:
        made = module.act_fn(times("up_proj", x))
    found = times("down_proj", made)
    return cast(Tensor, module.post_expert_norm(found) if module.has_post_expert_norm else found)


def _dbrx(module: Any, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    shape = module.num_experts, module.ffn_hidden_size, module.hidden_size
    gate, up, down = (
        weight.view(shape) for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2)
    )
    made = module.mlp.activation_fn(grouped(x, gate.mT, ends)) * grouped(x, up.mT, ends)
    return cast(Tensor, grouped(made, down, ends))


def _longcat(module: Any, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    """The last experts are identities: they return their inputs."""
    count = module.num_routed_experts
    if not count:
        return x
    ends = ends[:count]
    gate, up = grouped(x, module.gate_up_proj[:count].mT, ends).chunk(2, dim=-1)
    found = grouped(module.act_fn(gate) * up, module.down_proj.mT, ends)
    computed = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(computed[:, None], found, x)


_Products = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""The results of tokens (S, width) sorted by expert, given the module, the end of each expert's
tokens, and each token's expert (S,)."""

_LOOPS: dict[str, tuple[_Products, str]] = {
    "DbrxExperts": (_dbrx, "num_experts"),
    "LongcatFlashExperts": (_longcat, "total_experts"),
}
"""Classes that loop: their products, and the attribute that counts experts."""

_SORTING = (None, "eager", "grouped_mm")
"""transformers' implementations of experts with the same results as here. It uses the last one by
default; a user may have chosen another one."""


def gathering(module: nn.Module) -> Handle | None:
    """Let a module of experts that loops sort tokens by expert in graphs; None: another module."""
    known = _LOOPS.get(type(module).__name__)
    if known is None:
        return None
    return Replaced(module, "forward", partial(_in_graphs, module.forward, module, *known))


def route_experts(model: nn.Module) -> list[Handle]:
    """Let the native kernel multiply experts' weights outside graphs where it is faster: on the
    CPU, without gradients, in a dtype for which torch has no fast product.

    Returns:
        The changes, none without the native library.
    """
    if not native_library.available:
        return []
    found: list[Handle] = []
    for module in model.modules():
        usual = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
        known = (_usual, "num_experts") if usual else _LOOPS.get(type(module).__name__)
        if known is not None:
            forward = partial(_where_faster, module.forward, module, *known)
            found.append(Replaced(module, "forward", forward))
    return found


def _in_graphs(own: Any, module: Any, products: _Products, count: str, *given: Tensor) -> Any:
    graph = torch.compiler.is_compiling()
    return _sorted(module, products, count, *given) if graph else own(*given)


def _where_faster(
    own: Any,
    module: Any,
    products: _Products,
    count: str,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    **more: Any,
) -> Any:
    """A forward of experts, with the names of transformers' arguments."""
    given = hidden_states, top_k_index, top_k_weights
    if more or not _gains(module, *given):
        return own(*given, **more)
    return _sorted(module, products, count, *given)


def _gains(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    if torch.compiler.is_compiling() or not (hidden.is_cpu and is_slow(hidden.dtype)):
        return False
    parameters = [*module.parameters()]
    return (
        index.numel() > 0
        and not wants_gradients(hidden, weights, *parameters)
        and all(type(x) is nn.Parameter and x.dtype is hidden.dtype for x in parameters)
        and not getattr(module, "_is_expert_parallel", False)
        and getattr(vars(module).get("config"), "_experts_implementation", None) in _SORTING
        and not torch.is_autocast_enabled("cpu")
    )


def _sorted(
    module: Any, products: _Products, count: str, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Args:
    hidden: (..., width).
    index, weights: the experts of each token, and their shares of the result, (n, k).
    """
    tokens, chosen = hidden.reshape(-1, hidden.shape[-1]), index.shape[-1]
    experts, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(getattr(module, count), device=index.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    results = products(module, tokens[order // chosen], ends, experts)
    shared = (results * weights.reshape(-1)[order, None])[order.argsort()]
    summed = shared.view(len(tokens), chosen, -1).sum(dim=1)
    return summed.to(hidden.dtype).view_as(hidden)
