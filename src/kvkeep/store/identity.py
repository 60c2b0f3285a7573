"""The identity of a model's slots in a store, and the computation of missing slots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.host import Activation, Host, ModelCache
from kvkeep.host.compress import compresses
from kvkeep.host.hooks import foreign_hooks
from kvkeep.spec import CacheSpec
from kvkeep.store.beginning import exact_specs
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import require_storable, why_not_keepable

_TOKEN_BITS = 24  # bits of a token's id in its key; the bits above identify the adapter


class Keyed(NamedTuple):
    """The identity of tokens in a store, and their keys in its tree, int64 (n,)."""

    identity: str
    keys: Tensor


def keyed(
    host: Host,
    tokens: Tensor,
    specs: Sequence[CacheSpec],
    namespace: str = "",
    activation: Activation | None = None,
) -> Keyed:
    """The identity and keys of a model's tokens, int64 (n,)."""
    identity = identity_of(host, specs, namespace, activation)
    return Keyed(identity, keys_of(tokens, activation))


def keys_of(tokens: Tensor, activation: Activation | None) -> Tensor:
    """The keys of tokens, int64 (n,): their ids. Keys of tokens that an activated adapter computes
    also hold bits of the adapter's hash; tokens before the invocation are computed by the base
    model and shared by all adapters."""
    if activation is None:
        return tokens
    adapter, keys = int(activation.adapter, 16), tokens.clone()
    # Any four tokens in a row hold all 128 bits of the adapter's hash.
    parts = [(adapter >> 32 * i) & 0xFFFFFFFF | 1 << 32 for i in range(4)]
    behind = torch.arange(max(0, len(tokens) - activation.start)) % 4
    keys[activation.start :] |= torch.tensor(parts)[behind] << _TOKEN_BITS
    return keys


def identity_of(
    host: Host,
    specs: Sequence[CacheSpec],
    namespace: str = "",
    activation: Activation | None = None,
) -> str:
    """The identity of a model's slots. It covers everything that a token's slots depend on except
    the tokens: the model, its active adapters, the codecs of exact slots, the compression, whether
    attention is kvkeep's, the autocast dtype and the namespace.

    Raises:
        UnsupportedError: the model has hooks of its user.
    """
    require_known(host)
    layers = [f"{spec.key_codec}/{spec.value_codec}" for spec in exact_specs(specs)]
    found = host.fingerprint(glance=True)
    if activation is not None:
        found["adapter"] = "none"
    named: dict[str, object] = {
        "namespace": namespace,
        "model": found,
        "codecs": layers if len(set(layers)) > 1 else layers[:1],
        "routed": host.attached,
        "autocast": _autocast(host),
    }
    if any(spec.policy.compression for spec in specs):
        policies = [repr(spec.policy) for spec in specs]
        named["compressed"] = policies if len(set(policies)) > 1 else policies[:1]
    return json.dumps(named, sort_keys=True)


def geometry_of(host: Host, cache: ModelCache, tokens: Tensor) -> ModelGeometry:
    """The geometry of a model's slots in a cache of the same specs. A config may lack it, so one
    token is fed to another cache to find it.

    Args:
        tokens: token ids of the model, int64 (n,), n at least 1.
    """
    probe = host.new_cache()
    feed(host, tokens[:1], probe)
    found = ModelGeometry.of_cache(probe).of_rows
    return ModelGeometry.of(cache.layers, found, probe.routed, probe.carried.specs)


def require_known(host: Host) -> None:
    """Raise UnsupportedError when a model has hooks of its user, which may change keys."""
    hooks = [f"{place} has a {hook}" for place, hook in foreign_hooks(host.model).items()]
    if hooks:
        raise UnsupportedError(
            f"hooks may change keys and values, so slots cannot be reused: {hooks[0]}"
            + (f", and {len(hooks) - 1} more modules have hooks" if len(hooks) > 1 else "")
            + "; remove the hook, or use neither stores nor blocks with the model"
        )


def require_reusable(host: Host, cache: ModelCache, *, outside: bool) -> None:
    """Raise UnsupportedError when slots of a cache cannot be shared with other prompts.

    Args:
        outside: whether the store has a backend.
    """
    require_storable(cache, why_not_keepable)
    require_steady(host)
    reason = "a backend may lose blocks of one process" if outside else ""
    if compresses(cache) and not outside:
        reason = "kvzip keeps different numbers of slots in each process"
    if reason and host.parallel:
        raise UnsupportedError(
            f"several processes compute {host.name} together and must find the same tokens, but "
            f"{reason}; use a PrefixStore() without a backend, with keep_all"
        )
    if compresses(cache) and cache.activation is not None:
        raise UnsupportedError(
            "a text is compressed without regard to an activated adapter, which computes only a "
            "part of this prompt; use keep_all"
        )


def require_steady(host: Host) -> None:
    """Raise UnsupportedError when a token's keys depend on the tokens that follow it, or on hooks
    of the model's user."""
    require_known(host)
    if host.changing_rotary:
        raise UnsupportedError(
            f"rotary frequencies of kind {host.changing_rotary} depend on a text's length, so its "
            "slots cannot be reused in another text; use the cache without a store"
        )


def _autocast(host: Host) -> str:
    """The dtype in which torch computes matrix products under autocast; empty without autocast."""
    kind = host.device.type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


@torch.inference_mode()
def feed(
    host: Host,
    tokens: Tensor,
    cache: ModelCache,
    chunk: int | None = None,
    *,
    block: int | None = None,
) -> None:
    """Feed tokens, int64 (n,), to a cache, `chunk` at a time, without logits.

    Tokens of an activated adapter are fed in separate calls, so that the tokens before them are
    computed exactly as by the base model. Recurrent states are marked after each multiple of
    `block` tokens, and at the end.
    """
    ids = tokens.to(host.device)[None]
    first, stop = cache.fed, cache.fed + len(tokens)
    marks = block is not None and bool(cache.carried)
    while (at := cache.fed) < stop:
        borders = [stop]
        if chunk is not None:
            borders.append(at + chunk)
        if cache.activation is not None and cache.activation.start > at:
            borders.append(cache.activation.start)
        if marks and block is not None:
            borders.append(at - at % block + block)
        host.feed(ids[:, at - first : min(borders) - first], cache)
        if marks and (cache.fed == stop or cache.fed % (block or 1) == 0):
            cache.mark()


def flat(tokens: Tensor) -> Tensor:
    """Token ids, int64 (n,), on the CPU.

    Raises:
        ShapeError: the tokens are not integers in one row.
    """
    if tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise ShapeError(f"token ids {tuple(tokens.shape)} {tokens.dtype}; give integers (n,)")
    return tokens.to("cpu", torch.int64)
