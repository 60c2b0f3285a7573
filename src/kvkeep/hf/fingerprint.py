"""The fingerprint of a transformers model: its tensors, modules and config."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kvkeep.hf.config import base_config, changing_ropes, decoder_config
from kvkeep.host import Activation
from kvkeep.host.adapters import invoked_adapter
from kvkeep.host.fingerprint import as_text, fingerprint_of

_BESIDE = {
    "architectures",
    "attn_implementation",
    "dtype",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "rope_parameters",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields of a config that do not change what is computed, or that another part of the fingerprint
covers."""


def fingerprint(model: nn.Module, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
    """What the keys and values of a model depend on, as hashes and as text. Hashes some gigabytes
    of weights in a second.

    It says what a model computes, not where it came from: one that was read from a GGUF file has
    the fingerprint of the directory that it was converted to.

    Args:
        tokenizer: the model's tokenizer, to be hashed too.
        glance: do not read weights again that look as they did: the same tensors, not written to
            as far as torch knows, and alike in an element of each row of an embedding and in 16 of
            every other tensor. What a write through `.data` changes beside those is missed until
            `fingerprint(model)` is called, which reads everything.

    Returns:
        `weights` (parameters and what else a state dict has), `buffers` (all others, such as
        rotary frequencies), `modules` (their kinds and numbers, such as a norm's epsilon), and
        `adapter` ("none", or of what is active), as hashes; `rope`, `dtype` and `config` (what else
        the decoder's config says of what is computed), as text; and `tokenizer`, hashes of its
        parts, if one is given.

    Raises:
        UnsupportedError: a weight cannot be read, because it is on no device or of an unknown kind.
    """
    config = decoder_config(base_config(model))
    said = {"rope": _rope(config), "config": as_text(_said_by(config))}
    changing = bool(changing_ropes(config))
    return fingerprint_of(model, said, tokenizer, glance=glance, changing=changing)


def activation_in(model: nn.Module, prompt: Tensor) -> Activation | None:
    """Where an activated adapter starts to compute in a prompt, (n,); None if none is active.

    Raises:
        UnsupportedError: see `kvkeep.host.adapters.invoked_adapter`.
    """
    found = invoked_adapter(model)
    if found is None:
        return None
    return Activation(found.start(prompt), fingerprint(model, glance=True)["adapter"])


def _said_by(config: Any) -> dict[str, Any]:
    """The fields of a config that may change what is computed: no names, token ids, or ways of
    computing."""
    said = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _BESIDE and not name.endswith("_token_id")
    }
    quantization = said.get("quantization_config") or {}
    if str(quantization.get("quant_method", "")).lower().endswith("gguf"):
        del said["quantization_config"]  # of a file whose weights became plain ones
    return said


def _rope(config: Any) -> str:
    found = dict(getattr(config, "rope_parameters", None) or {})
    if changing_ropes(config):
        found["max_position_embeddings"] = config.max_position_embeddings
    return as_text(found)
