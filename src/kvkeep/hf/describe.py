"""Describes a model and the caches that it can use, from its config: no weights are loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvkeep.errors import KVKeepError, ModelError, reason_of
from kvkeep.hf.attach import attach, detach
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config
from kvkeep.hf.kinds import layer_kinds
from kvkeep.hf.loading import adapter_files
from kvkeep.hf.loading.hub import hub_error
from kvkeep.hf.models import config_of, located, resolve
from kvkeep.host.placement import dtype_on
from kvkeep.host.progress import Progress, silent
from kvkeep.spec import parse_specs


def describe(
    name: str,
    spec: str = "keep_all",
    dtype: str = "auto",
    device: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Describe a model. `attach` is tried on a model of the same class and config, without weights.

    Args:
        name: see `kvkeep.hf.models.load`. A model with a short name is fetched; for a name on the
            hub, only the config is downloaded.
        spec: the spec of the cache whose size is described.
        dtype, device: dtype and device of the cache; see `kvkeep.hf.models.load`.

    Returns:
        `model`; `base` (of an adapter); `type`; `class`; `layers` (number of layers of each type);
        `parameters`; `query_heads`; `kv_heads`; `head_dim`; `context`; `dtype` (of the weights);
        `attention` (who computes attention if the model is attached: "kvkeep" or "its own"; None:
        attach refuses the model); `why` (why kvkeep does not); `cache` (the spec);
        `bytes_per_token` (bytes of a cache of one token); `bytes_at_context`; `no_cache` (why the
        model cannot have this cache); `cache_dtype`. None where the config lacks a value.

    Raises:
        ModelError, AdapterError, MissingPackageError: see `kvkeep.hf.models.load`.
        HubError: the config cannot be downloaded.
        SpecError: the spec does not exist.
    """
    parsed, (kind, _) = parse_specs(spec), dtype_on(device, dtype)
    base = adapter_files.base_of(name) if adapter_files.is_adapter(name) else None
    progress(f"reading the config of {name}", None)
    where, options = located(resolve(base or name, progress))
    try:
        config = config_of(where, options)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except KVKeepError:
        raise
    except Exception as error:  # libraries may raise any exception on an invalid config
        if isinstance(error, OSError) and not Path(where).exists():
            raise hub_error(where, error) from error
        raise ModelError(
            f"cannot read {name!r}: {reason_of(error)}; give a model that AutoModelForCausalLM "
            "takes"
        ) from error
    text = decoder_config(config)
    heads, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    weights, context = text.dtype or config.dtype, getattr(text, "max_position_embeddings", None)
    found = {
        "model": name,
        "base": base,
        "type": config.model_type,
        "class": type(model).__name__,
        "layers": _layers(config),
        "parameters": model.num_parameters(),
        "query_heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or (width // heads if heads else None),
        "context": context,
        "dtype": None if weights is None else str(weights).removeprefix("torch."),
    }
    progress("trying a model without weights", None)
    sizes = _sizes(model, parsed, context, kind)
    about = {"cache": str(parsed), "cache_dtype": str(kind).removeprefix("torch.")}
    return {**found, **_attached(model), **about, **sizes}


def _layers(config: Any) -> dict[str, int]:
    """The number of attention layers of each type, and of all other layers."""
    text = decoder_config(config)
    try:
        kinds = Counter(kind.name for kind in layer_kinds(config))
    except KVKeepError:
        kinds = Counter()
    others = (getattr(text, "num_hidden_layers", 0) or 0) - sum(kinds.values())
    return {**kinds, **({"other": others} if others > 0 else {})}


def _attached(model: Any) -> dict[str, str | None]:
    try:
        attachment = attach(model)
    except KVKeepError as error:
        return {"attention": None, "why": str(error)}
    detach(model)
    return {"attention": "its own" if attachment.own else "kvkeep", "why": attachment.own or None}


def _sizes(model: Any, spec: Any, context: int | None, dtype: torch.dtype) -> dict[str, Any]:
    names = ("bytes_per_token", "bytes_at_context", "no_cache")
    try:
        cache = Cache(model, spec, capacity=context)
        one = cache.bytes_for(1, dtype=dtype)
        whole = cache.bytes_for(context, dtype=dtype) if context else None
    except KVKeepError as error:
        return dict(zip(names, (None, None, str(error)), strict=True))
    return dict(zip(names, (one, whole, None), strict=True))
