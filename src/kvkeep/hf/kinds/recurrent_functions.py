"""Functions of transformers' recurrent layers, faster on the CPU.

Their results equal those of transformers' own functions, up to rounding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.checks import wants_gradients
from kvkeep.choice import is_slow
from kvkeep.hf.kinds.rebound import Rebound


def hastened(module: nn.Module) -> Any:
    """A layer's forward with the functions of this module; None: it uses none of them, or something
    has replaced it."""
    kind = type(module)
    if "forward" in vars(module) or not kind.__module__.startswith("transformers.models."):
        return None
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    used = _FUNCTIONS.keys() & set(getattr(code, "co_names", ()))
    if not used:
        return None

    def faster(source: Any) -> dict[str, Any]:
        return {name: _FUNCTIONS[name](getattr(source, name)) for name in used}

    return Rebound.of(kind, faster).of_module(module)


def _convolved(own: Any) -> Any:
    """A depthwise causal convolution of a chunk."""

    def run(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return own(hidden_states, *_wider(weight, bias), *args, **kwargs)

    return run


def _updated(own: Any) -> Any:
    """A depthwise causal convolution of one token, after the inputs in a state."""

    def run(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return own(hidden_states, conv_state, *_wider(weight, bias), *args, **kwargs)

    return run


def _wider(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weights of a convolution, in whose dtype it is computed, as float32 where that is
    faster."""
    if not weight.is_cpu or not is_slow(weight.dtype):
        return weight, bias
    return weight.float(), None if bias is None else bias.float()


def _stepped(own: Any) -> Any:
    """The gated delta rule, token by token; for one token, in place and by a product of matrices.

    Each head has a state S (Dk, Dv), a decay a, a key k, a query q, a value v and a factor b. The
    new state is a S + k d, where d = b (v - k a S), and the result q times the new state, which
    equals q a S + (q k) d. So the old state is read once for k and q.
    """

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Args:
        query, key: (B, 1, heads, Dk).
        value: (B, 1, H, Dv).
        g, beta: the decay's logarithm, and b: (B, 1, H).
        initial_state: float32 (B, H, Dk, Dv).
        """
        state = initial_state
        given = query, key, value, g, beta
        if (
            query.shape[1] != 1
            or state is None
            or not (state.is_cpu and state.dtype is torch.float32)
            or torch.compiler.is_compiling()
            or wants_gradients(*given, state)
        ):
            options = {
                "initial_state": state,
                "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            }
            return own(*given, **options, **kwargs)
        q, k, v, decay, factor = (x[:, 0].float() for x in given)
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        repeats = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
        state.mul_(decay.exp()[..., None, None])
        before, read = (torch.stack([k, q], dim=-2) @ state).unbind(dim=-2)
        added = (v - before) * factor[..., None]
        out = read + (q * k).sum(-1, keepdim=True) * added
        state.addcmul_(k[..., None], added[..., None, :])
        return out[:, None].to(query.dtype), state if output_final_state else None

    return run


_FUNCTIONS = {
    "causal_conv1d_fn": _convolved,
    "causal_conv1d_update": _updated,
    "torch_recurrent_gated_delta_rule": _stepped,
}
"""By the name in a layer's source file: makes the function, given the layer's own."""
