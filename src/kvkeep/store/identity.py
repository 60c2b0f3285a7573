"""What a store asks of a transformers model: what its keys and values depend on, and to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.hf.adapters import Takeover, activate
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import base_config, changing_ropes, decoder_config, is_routed
from kvkeep.hf.fingerprint import fingerprint
from kvkeep.spec import CacheSpec
from kvkeep.store.geometry import ModelGeometry

_TOKEN_BITS = 24  # of a token's id; what is above them says which adapter computed it


class Keyed(NamedTuple):
    """How tokens are stored: under which identity, and by which keys, int64 (n,)."""

    identity: str
    keys: Tensor


def keyed(
    model: PreTrainedModel,
    tokens: Tensor,
    specs: Sequence[CacheSpec],
    namespace: str = "",
    takeover: Takeover | None = None,
) -> Keyed:
    """How tokens, (n,), of a model are stored.

    The identity says all that the slots of a token depend on, beside the tokens up to it: the
    model, its active adapters, the specs, and whether attention is kvkeep's; of a namespace. The
    keys are the tokens, but where an activated adapter computed them they also say which: so what
    stands before is the base model's, and is found for any adapter.
    """
    layers = [f"{spec.key_codec}/{spec.value_codec}" for spec in specs]
    found = fingerprint(model, glance=True)
    if takeover is not None:
        found["adapter"], tokens = "none", tokens.clone()
        adapter = int(takeover.adapter, 16)
        # All of the adapter's hash is said by any four tokens.
        parts = [(adapter >> 32 * i) & 0xFFFFFFFF | 1 << 32 for i in range(4)]
        behind = torch.arange(max(0, len(tokens) - takeover.start)) % 4
        tokens[takeover.start :] |= torch.tensor(parts)[behind] << _TOKEN_BITS
    identity = json.dumps(
        {
            "namespace": namespace,
            "model": found,
            "codecs": layers if len(set(layers)) > 1 else layers[:1],
            "routed": is_routed(decoder_config(base_config(model))),
            "autocast": _autocast(model),
        },
        sort_keys=True,
    )
    return Keyed(identity, tokens)


def geometry_of(model: PreTrainedModel, cache: Cache, tokens: Tensor) -> ModelGeometry:
    """The geometry of a model's slots in a cache like this one, found by feeding one token to
    another cache, because configs do not tell it for every model.

    Args:
        tokens: of the model, (n,) with n of at least 1.
    """
    probe = Cache(model)
    feed(model, tokens[:1], probe)
    found = ModelGeometry.of_cache(probe).of_rows
    return ModelGeometry.of(cache.layers, found, probe.routed)


def require_steady(model: PreTrainedModel) -> None:
    """Raise UnsupportedError when what a model computes for a token depends on what comes later."""
    changing = changing_ropes(base_config(model))
    if changing:
        raise UnsupportedError(
            f"rotary frequencies of kind {changing[0]} depend on a text's length, so its slots "
            "serve no other text; use the cache without a store"
        )


def _autocast(model: PreTrainedModel) -> str:
    """The type that matrix products are computed in, where torch chooses it; empty elsewhere."""
    kind = model.device.type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


@torch.inference_mode()
def feed(model: PreTrainedModel, tokens: Tensor, cache: Cache, chunk: int | None = None) -> None:
    """Feed a cache tokens, int64 (n,), so many at once; no logits are computed. What an activated
    adapter computes is fed apart, so that the rest is computed as the base model would."""
    decoder = model.get_decoder()
    ids = tokens.to(model.device)[None]
    start = 0 if cache.takeover is None else cache.takeover.start
    before = min(len(tokens), max(0, start - cache.fed))
    try:
        for piece in ids.tensor_split([before], dim=1):
            for part in torch.split(piece, chunk or max(1, piece.shape[1]), dim=1):
                if part.shape[1]:
                    activate(
                        model, cache.takeover, torch.arange(cache.fed, cache.fed + part.shape[1])
                    )
                    decoder(input_ids=part, past_key_values=cache, use_cache=True)
    finally:  # or an adapter would take part in whatever is computed next
        activate(model, None, tokens)


def flat(tokens: Tensor) -> Tensor:
    """Token ids, int64 (n,), on the CPU.

    Raises:
        ShapeError: they are not whole numbers in one row.
    """
    if tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise ShapeError(f"token ids {tuple(tokens.shape)} {tokens.dtype}; give integers (n,)")
    return tokens.to("cpu", torch.int64)
