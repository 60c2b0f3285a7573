"""Scores with a bias by distance that depends on the query: Inkling.

A query has a bias for each distance up to a limit: a mix of trained profiles, weighted by the
token's hidden state. The model's modules add it to the scores of all tokens in order; here the
attention function gets the biases by distance, and attention finds a slot's bias by its position.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from kvkeep.features import Feature, Lacks
from kvkeep.hf.handover import BIAS
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.kinds.replaced_attention import Attention, Output


class Residuals(Kind):
    """Inkling 2, whose layers also read the hidden states of earlier layers."""

    lacks: ClassVar[Lacks] = {
        Feature.TRAINED: "passes more than hidden states from layer to layer, so gradients through "
        "a cache cannot be computed"
    }

    def has(self, text: PreTrainedConfig) -> bool:
        return getattr(text, "n_layers_per_attn_res_block", None) is not None


def inkling(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    conv_mask: Tensor | None = None,
    **_: Any,
) -> Output:
    """The forward of an attention module of Inkling."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    given = {"cache": attend.cache, "conv_mask": conv_mask}
    q = module.q_norm(module.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = module.k_sconv(module.k_proj(hidden_states), **given)
    k = module.k_norm(k.view(shape)).transpose(1, 2)
    v = module.v_sconv(module.v_proj(hidden_states), **given).view(shape).transpose(1, 2)
    states = module.r_proj(hidden_states).view(*shape[:-2], module.num_heads, -1).transpose(1, 2)
    floor = module.config.log_scaling_n_floor
    if not module.is_sliding and floor is not None:
        count = (attention_mask[:, :, 0, :, None] + 1).float()  # of tokens that the query sees
        far = torch.log((count / floor).clamp(min=1.0))
        scale = 1.0 + module.config.log_scaling_alpha * far
        q, states = ((x.float() * scale).to(x.dtype) for x in (q, states))
    options = {BIAS: states @ _profiles(module.rel_logits_proj)}
    dropout = module.attention_dropout
    out, weights = attend(q, k, v, attention_mask, module.scaling, dropout, **options)
    return module.o_proj(out.flatten(2)), weights


def inkling2(
    module: Any,
    attend: Attention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    key_hidden_states: Tensor | None = None,
    value_hidden_states: Tensor | None = None,
    cache_offset: int = 0,
    relative_distance: Any = None,
    **given: Any,
) -> Output:
    """The forward of an attention module of Inkling 2. Each query has a sink too: all of its scores
    are given relative to its sink's logit, so that all sinks' logits are 0."""
    position = given["position_ids"]
    of_keys, of_values = (
        hidden_states if x is None else x for x in (key_hidden_states, value_hidden_states)
    )
    q = module.q_proj(hidden_states, position)
    k = module.k_proj(of_keys, cache_offset=cache_offset, **given)
    v = module.v_proj(of_values, cache_offset=cache_offset, **given)
    relative = module.relative_position_bias
    states = relative.linear(hidden_states).view(*hidden_states.shape[:-1], q.shape[1], -1)
    sinks = module.sink_proj(hidden_states)[..., None]
    states = torch.cat([relative.norm(states, position), -sinks], dim=-1).transpose(1, 2)
    bias = states @ pad(_profiles(relative), (0, 0, 0, 1), value=1.0)
    options = {BIAS: bias, "s_aux": sinks.new_zeros(q.shape[1])}
    attend = attend._replace(place=module.layer_idx + cache_offset)
    dropout = module.attention_dropout
    out, weights = attend(q, k, v, attention_mask, module.scaling, dropout, **options)
    return module.o_proj(out.flatten(2), hidden_states), weights


def _profiles(module: Any) -> Tensor:
    """The profiles of biases by distance, and behind them 0 for all greater distances."""
    return pad(module.proj, (0, 1))
