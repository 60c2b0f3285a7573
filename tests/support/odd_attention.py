"""Models of unknown code: Llama, with something done between its cache and its attention."""

from __future__ import annotations

import torch
import transformers as tf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from kvkeep.hf.cache_argument import cache_in
from support.tiny_models import config, vivid


def attend(self, q, k, v, mask):
    function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    return function(self, q, k, v, mask, scaling=self.scaling)[0]


class Odd(llama.LlamaAttention):
    """Llama's attention, with something done between the cache and the attention function."""

    fault = "none"

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **given):
        cache = cache_in(given)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = self.attended(q, k, v, attention_mask, cache)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    def attended(self, q, k, v, mask, cache):
        if self.layer_idx == 1:
            if self.fault == "keys":
                k = 2 * k
            elif self.fault == "values":
                v = 2 * v
            elif self.fault == "in place":
                v.mul_(2)
            elif self.fault == "mask":
                mask = torch.zeros(1, 1, q.shape[2], k.shape[2])
            elif self.fault == "twice":
                return attend(self, q, k, v, mask) - 0.5 * attend(self, q, k, v, mask)
            elif self.fault == "elsewhere":
                k = k.repeat_interleave(2, dim=1)
                weights = (q @ k.mT).softmax(dim=-1)
                return (weights @ v.repeat_interleave(2, dim=1)).transpose(1, 2)
            elif self.fault == "again" and cache is not None:
                attend(self, q, k, v, mask)
                k, v = cache.update(k.clone(), v.clone(), self.layer_idx)
        return attend(self, q, k, v, mask)


KEEPS_ITS_OWN = {"keys", "values", "twice"}
"""What kvkeep's attention cannot take, but is right with the model's own."""

FAULTS = {
    "keys": "changes its keys after the cache",
    "values": "changes its values after the cache",
    "in place": "in place after the cache",
    "mask": "uses a mask of its own",
    "twice": "attends more than once",
    "elsewhere": "attention elsewhere|attended to other keys",
    "again": "more than once",
}


def with_odd_attention(model, fault):
    odd = type("OddAttention", (Odd,), {"fault": fault})
    for layer in model.layers:
        layer.self_attn.__class__ = odd
    return model


class OddModel(tf.LlamaModel):
    """Code from elsewhere, whose layers attend in a way of their own."""

    def __init__(self, config):
        super().__init__(config)
        with_odd_attention(self, config.fault)


class OddForCausalLM(tf.LlamaForCausalLM):
    """An `OddModel` with a head."""

    def __init__(self, config):
        super().__init__(config)
        self.model = OddModel(config)


def odd(fault="values"):
    """A tiny model whose last layer has a fault; by default one that keeps its own attention."""
    torch.manual_seed(0)
    return vivid(OddForCausalLM(config("llama", fault=fault)).eval())
