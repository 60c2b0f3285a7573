"""The fingerprint of a transformers model: its tensors, modules and config."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.hf.config import base_config, changing_ropes, decoder_config
from kvkeep.host import Activation
from kvkeep.host.adapters import invoked_adapter
from kvkeep.host.fingerprint import as_text, fingerprint_of

_IRRELEVANT_FIELDS = {
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
"""Config fields that do not affect keys and values, or that another part of the fingerprint
covers."""


def fingerprint(model: nn.Module, tokenizer: Any = None, *, glance: bool = False) -> dict[str, str]:
    """Everything on which a model's keys and values depend, as hashes and as text. Hashing reads
    several gigabytes of weights per second.

    The fingerprint depends on a model's computation, not on its source: a model loaded from a GGUF
    file has the same fingerprint as a directory to which the file was converted.

    Args:
        tokenizer: the model's tokenizer, to hash too.
        glance: skip reading weights that appear unchanged: the same tensors, with the same version
            counters in torch, and the same values in one element of each row of an embedding and in
            16 elements of every other tensor. A write through `.data` to other elements is missed
            until `fingerprint(model)` is called, which reads everything.

    Returns:
        As hashes: `weights` (parameters, persistent buffers, and further tensors of quantised
        layers), `buffers` (all other buffers, such as rotary frequencies), `modules` (their classes
        and numeric attributes, such as a norm's epsilon), and `adapter` ("none", or the active
        adapters). As text: `rope`, `dtype` and `config` (the other fields of the model's config
        that affect the result). `hooks`, only if the user has set hooks: unique to this model and
        process. `tokenizer`, hashes of its parts, only if a tokenizer is given.

    Raises:
        UnsupportedError: a weight cannot be read, because it is on the meta device or of an unknown
            kind.
    """
    whole = base_config(model)
    config = decoder_config(whole)
    described = {"rope": _rope(config), "config": as_text(relevant_fields(whole))}
    changing = bool(changing_ropes(config))
    return fingerprint_of(model, described, tokenizer, glance=glance, changing=changing)


def activation_in(model: nn.Module, prompt: Tensor) -> Activation | None:
    """The activation of an activated adapter by a prompt, (n,); None: no such adapter is active.

    Raises:
        UnsupportedError: see `kvkeep.host.adapters.invoked_adapter`.
    """
    found = invoked_adapter(model)
    if found is None:
        return None
    return Activation(found.start(prompt), fingerprint(model, glance=True)["adapter"])


def relevant_fields(config: Any) -> dict[str, Any]:
    """The config fields that may affect the result; not names, token ids, or implementation
    choices."""
    found = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_")
        and name not in _IRRELEVANT_FIELDS
        and not name.endswith("_token_id")
    }
    for name in config.sub_configs:  # of the decoder and of encoders for images or sound
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            found[name] = relevant_fields(part)
    quantization = found.get("quantization_config") or {}
    if str(quantization.get("quant_method", "")).lower().endswith("gguf"):
        del found["quantization_config"]  # a GGUF file's weights are dequantised when it is loaded
    return found


def _rope(config: Any) -> str:
    found = dict(getattr(config, "rope_parameters", None) or {})
    if changing_ropes(config):
        found["max_position_embeddings"] = config.max_position_embeddings
    return as_text(found)
