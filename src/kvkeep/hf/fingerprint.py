"""Fingerprint: what the keys and values of a model depend on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn

from kvkeep.hf.adapters import Takeover, activation, active_adapters
from kvkeep.hf.config import base_config, decoder_config

_SAMPLE = 16  # elements of a tensor


_BESIDE = {
    "architectures",
    "attn_implementation",
    "dtype",
    "id2label",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""What a config says beside what is computed."""

_known: WeakKeyDictionary[nn.Module, tuple[object, tuple[str, str]]] = WeakKeyDictionary()


def fingerprint(model: nn.Module, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
    """What the keys and values of a model depend on, as hashes and as text. Hashes some gigabytes
    of weights in a second.

    Args:
        tokenizer: the model's tokenizer, to be hashed too.
        glance: do not read weights again that look as they did: the same tensors, not written to
            as far as torch knows, and alike in a sample of each.

    Returns:
        `weights`, `adapter` ("none", or a hash of what is active), `rope`, `dtype`, `config` (what
        else the decoder's config says of what is computed), and `tokenizer` if one is given.
    """
    weights, adapter = _hashes_at_a_glance(model) if glance else _hashes(model)
    config = decoder_config(base_config(model))
    rope = getattr(config, "rope_parameters", None)
    added, _ = active_adapters(model)
    dtypes = sorted(
        {
            str(x.dtype)
            for name, x in model.named_parameters()
            if x.is_floating_point() and not added & set(name.split("."))
        }
    )
    found = {
        "weights": weights,
        "adapter": adapter,
        "rope": json.dumps(rope, sort_keys=True, default=str),
        "dtype": " ".join(dtypes),
        "config": _hash_of_config(config),
    }
    if tokenizer is not None:
        found["tokenizer"] = _hash_of_tokenizer(tokenizer)
    return found


def _hashes_at_a_glance(model: nn.Module) -> tuple[str, str]:
    stamp = _stamp(model)
    known = _known.get(model)
    if known is None or known[0] != stamp:
        known = _known[model] = (stamp, _hashes(model))
    return known[1]


def _stamp(model: nn.Module) -> object:
    """What changes, as far as can be seen at a glance, when a weight or an adapter does."""
    tensors = [
        (name, x.data_ptr(), x._version, x.detach().flatten()[:: x.numel() // _SAMPLE + 1].tolist())
        for name, x in _tensors(model)
    ]
    return tensors, active_adapters(model)


def _hashes(model: nn.Module) -> tuple[str, str]:
    """Of all weights, and of the active adapters; "none" without them."""
    weights, adapter = xxhash.xxh3_128(), xxhash.xxh3_128()
    layers, active = active_adapters(model)
    for name, x in sorted(_tensors(model)):
        # As the model without adapters calls it.
        plain = name.removeprefix("base_model.model.")
        plain = plain.replace(".base_layer.", ".").replace(".original_module.", ".")
        parts = set(plain.split("."))
        if not parts & layers:
            _add(weights, plain, x)
        elif parts & set(active):
            _add(adapter, plain, x)
    adapter.update(json.dumps(active).encode())
    return weights.hexdigest(), adapter.hexdigest() if active else "none"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once."""
    seen = set()
    for name, x in model.state_dict(keep_vars=True).items():
        place = (x.data_ptr(), tuple(x.shape))
        if place not in seen or not x.numel():
            seen.add(place)
            yield name, x


def _add(to: Any, name: str, x: Tensor) -> None:
    to.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
    flat = x.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        to.update(flat.view(torch.uint8).numpy().data)


def _hash_of_config(config: Any) -> str:
    """Of all that may change what is computed: it has no names, token ids, or ways of computing."""
    said = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _BESIDE and not name.endswith("_token_id")
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, default=str).encode())


def _hash_of_tokenizer(tokenizer: Any) -> str:
    """Of its vocabulary, special tokens and chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    parts = [vocabulary, str(tokenizer.special_tokens_map), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def takeover_in(model: nn.Module, prompt: Tensor) -> Takeover | None:
    """Where an activated adapter takes over in a prompt, (n,); None if none is active.

    Raises:
        UnsupportedError: see `kvkeep.hf.adapters.activation`.
    """
    found = activation(model)
    if found is None:
        return None
    return Takeover(found.start(prompt), fingerprint(model, glance=True)["adapter"])
