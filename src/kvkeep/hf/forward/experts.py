"""Experts of transformers models that loop over the experts which tokens have chosen.

The length of this loop depends on data, so graphs cannot contain it. In a graph, tokens are sorted
by expert instead, and one operation computes the products with all experts' weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvkeep.graph.linear_op import grouped
from kvkeep.hf.kinds.base import Handle, Replaced


def _dbrx(module: Any, x: Tensor, ends: Tensor) -> Tensor:
    shape = module.num_experts, module.ffn_hidden_size, module.hidden_size
    gate, up, down = (
        weight.view(shape) for weight in (module.mlp.w1, module.mlp.v1, module.mlp.w2)
    )
    made = module.mlp.activation_fn(grouped(x, gate.mT, ends)) * grouped(x, up.mT, ends)
    return cast(Tensor, grouped(made, down, ends))


def _longcat(module: Any, x: Tensor, ends: Tensor) -> Tensor:
    """The last experts are identities: they return their inputs."""
    count = module.num_routed_experts
    if not count:
        return x
    ends = ends[:count]
    gate, up = grouped(x, module.gate_up_proj[:count].mT, ends).chunk(2, dim=-1)
    found = grouped(module.act_fn(gate) * up, module.down_proj.mT, ends)
    computed = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(computed[:, None], found, x)


_EXPERTS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "DbrxExperts": (_dbrx, "num_experts"),
    "LongcatFlashExperts": (_longcat, "total_experts"),
}
"""By class: a function of tokens sorted by expert, and the attribute that counts experts."""


def gathering(module: nn.Module) -> Handle | None:
    """Let a module of experts sort tokens by expert in graphs; None: an unknown class."""
    known = _EXPERTS.get(type(module).__name__)
    if known is None:
        return None
    return Replaced(module, "forward", partial(_forward, module.forward, module, *known))


def _forward(
    own: Any, module: Any, products: Any, count: str, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Args:
    hidden: (..., width).
    index, weights: the experts of each token, and their shares of the result, (n, k).
    """
    if not torch.compiler.is_compiling():
        found: Tensor = own(hidden, index, weights)
        return found
    tokens, chosen = hidden.reshape(-1, hidden.shape[-1]), index.shape[-1]
    experts, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(getattr(module, count), device=index.device)
    ends = torch.searchsorted(experts, numbers, right=True)
    results = products(module, tokens[order // chosen], ends)
    shares = weights.reshape(-1)[order, None]
    summed = torch.zeros_like(tokens).index_add(0, order // chosen, (results * shares).to(tokens))
    return summed.view_as(hidden)
