"""What a store asks of a transformers model: what its keys and values depend on, and to read."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.config import base_config, decoder_config, is_routed
from kvkeep.hf.fingerprint import fingerprint
from kvkeep.spec import CacheSpec


def identity_of(model: PreTrainedModel, specs: Sequence[CacheSpec], namespace: str = "") -> str:
    """All that the slots of a token depend on, beside the tokens up to it: the model, its active
    adapters, the specs, and whether attention is kvkeep's. Of a namespace."""
    layers = [f"{spec.key_codec}/{spec.value_codec}" for spec in specs]
    return json.dumps(
        {
            "namespace": namespace,
            "model": fingerprint(model, glance=True),
            "codecs": layers if len(set(layers)) > 1 else layers[:1],
            "routed": is_routed(decoder_config(base_config(model))),
        },
        sort_keys=True,
    )


@torch.inference_mode()
def feed(model: PreTrainedModel, tokens: Tensor, cache: Cache, chunk: int | None = None) -> None:
    """Feed a cache tokens, int64 (n,), so many at once; no logits are computed."""
    decoder = model.get_decoder()
    ids = tokens.to(model.device)[None]
    step = chunk or max(1, len(tokens))
    for start in range(0, len(tokens), step):
        part = ids[:, start : start + step]
        decoder(input_ids=part, past_key_values=cache, use_cache=True)
