"""LitGPT's own cache and kvkeep's, in a LitGPT model with the weights of a transformers model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as checkpointed
from transformers import PreTrainedModel

from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import changing_ropes
from kvkeep.host import host_of
from kvkeep_lab.bench.decode_loop import bytes_per_token
from kvkeep_lab.bench.options import Decode
from kvkeep_lab.bench.systems import EAGER, LITGPT, BaseSystems, Feed, twin

_CHUNK = 1024  # tokens of a prompt fed at once


def converted(model: PreTrainedModel) -> GPT:
    """A LitGPT model with copies of the weights of a Llama of transformers, made by LitGPT's own
    conversion.

    Raises:
        UnsupportedError: another type of model, or a scaled rotary embedding.
    """
    config = model.config
    kind = config.rope_parameters.get("rope_type") if config.model_type == "llama" else ""
    if kind != "default" or changing_ropes(config) or config.attention_bias or config.mlp_bias:
        raise UnsupportedError(
            "only a Llama without biases and with a plain rotary embedding is converted to LitGPT, "
            f"not this {config.model_type}"
        )
    settings = Config(
        name=str(model.name_or_path) or "converted",
        block_size=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_query_groups=config.num_key_value_heads,
        n_embd=config.hidden_size,
        head_size=config.head_dim,
        rotary_percentage=1.0,
        rope_base=config.rope_parameters["rope_theta"],
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=config.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=config.intermediate_size,
    )
    weights: dict[str, Tensor] = {}
    given = {name: x for name, x in model.state_dict().items() if "rotary" not in name}
    copy_weights_hf_llama(settings, {}, weights, given)
    with torch.device("meta"):
        gpt = GPT(settings)
    gpt.load_state_dict(weights, assign=True)
    gpt.cos, gpt.sin = gpt.rope_cache(device=model.device)
    return gpt.eval().requires_grad_(False)


def next_token_loss(gpt: GPT, ids: Tensor) -> Tensor:
    """The mean loss of each token of ids (1, T), predicted from the tokens before it."""
    logits = gpt(ids)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def checkpoint(gpt: GPT) -> None:
    """Let a model keep each layer's input only, and compute the rest again in the backward."""
    for block in gpt.transformer.h:
        block.forward = partial(checkpointed, block.forward, use_reentrant=False)


class LitGPTSystems(BaseSystems):
    """LitGPT's own cache, and kvkeep's caches with each spec.

    Args:
        model: of transformers, from which the LitGPT model is made.
        asked: its ways are "default" and "eager", or one of them; it is against `LITGPT`, or
            nothing.
    """

    lead = LITGPT

    def __init__(self, model: Any, asked: Decode) -> None:
        super().__init__(asked)
        self._plain, self._token_bytes = converted(model), bytes_per_token(model)
        self._hosts = {way: host_of(twin(self._plain)) for way in self._ways}
        for way, host in self._hosts.items():
            host.attach(linears=way != EAGER)

    def bytes_of(self, context: int) -> int:
        """The slots, and LitGPT's mask."""
        return context * self._token_bytes + self._room**2

    @torch.inference_mode()
    def feed(self, name: str) -> Feed:
        """See `BaseSystems`."""
        assert self._ids is not None  # a random model is refused
        pieces = torch.split(self._ids[:, :-1], _CHUNK, dim=1)
        if name in self._ours:
            spec, way = self._ours[name]
            host = self._hosts[way]
            cache = host.new_cache(spec)
            for piece in pieces:
                host.feed(piece, cache)
            return torch.inference_mode()(lambda token: host.forward(token, cache)[:, -1])
        gpt = twin(self._plain)
        gpt.max_seq_length = min(self._room, gpt.config.block_size)
        gpt.set_kv_cache(1, device=self._ids.device, dtype=gpt.lm_head.weight.dtype)
        at = torch.arange(self._held + 1, device=self._ids.device)
        for place, piece in zip(torch.split(at[:-1], _CHUNK), pieces, strict=True):
            gpt(piece, place, input_pos_maxp1=int(place[-1]) + 1)
        position, most = at[-1:].clone(), [self._held + 1]

        def step(token: Tensor) -> Tensor:
            logits: Tensor = gpt(token, position, input_pos_maxp1=most[0])[:, -1]
            position.add_(1)
            most[0] += 1
            return logits

        return torch.inference_mode()(step)
