"""Exact slots, which stores hold, and with which caches of any spec can begin.

A cache begins with the slots of a plain `keep_all` cache if it has a budget, or if its codec
encodes tokens in blocks or has a centre, which depends on the text. Its policy evicts after the
next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvkeep.codec import keeps_plain
from kvkeep.host import ModelCache
from kvkeep.layer.beginning import begin_with
from kvkeep.policy import KeepAll, Need
from kvkeep.spec import CacheSpec, StorageSpec
from kvkeep.storage import STORAGES

_OBSERVED_AGAIN = 64  # queries, for policies that observe all queries
_SCALING = 16  # queries, for codecs that scale the channels of keys by them


def exact_specs(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """The specs of the exact slots with which a cache of `specs` begins: `specs` itself, for
    policies that keep all tokens and codecs that encode single tokens."""
    return list(map(_exact, specs))


def _exact(spec: CacheSpec) -> CacheSpec:
    if spec.policy.compression is not None:  # stored as compressed texts
        return spec
    key, value = spec.key_codec, spec.value_codec
    alone = key.rewritable and value.rewritable and not key.centre
    late = keeps_plain(key, value)  # the newest tokens stay plain
    if spec.policy.evicts or late or not alone:
        return CacheSpec(KeepAll())
    return spec if STORAGES[spec.storage.name].lasting else replace(spec, storage=StorageSpec())


def encodes_alike(specs: Sequence[CacheSpec], others: Sequence[CacheSpec]) -> bool:
    """Whether caches of both specs have the same codecs."""
    pairs = zip(specs, others, strict=True)
    return all((a.key_codec, a.value_codec) == (b.key_codec, b.value_codec) for a, b in pairs)


def observed_again(cache: ModelCache) -> int:
    """Number of a text's last tokens that must be fed again to a cache that begins with the text,
    because its policies, or the centres of keys that are still plain, need their queries."""
    policies = [layer.policy for layer in cache.layers]
    needing = [one for one in policies if one.needs & {Need.MASS, Need.QUERIES}]
    scaled = any(layer.slots.late and layer.key_codec.centre for layer in cache.layers)
    again = [one.observed or _OBSERVED_AGAIN for one in needing] + [_SCALING] * scaled
    return max(again, default=0)


def beginning_of(cache: ModelCache, tokens: Tensor) -> tuple[list[CacheSpec], Tensor]:
    """The `exact_specs` of the slots with which a cache begins, and those of its tokens, (n,), that
    it begins with. The same specs and all tokens, if its own slots are exact."""
    exact = exact_specs(cache.specs)
    again = 0 if exact == cache.specs else observed_again(cache)
    return exact, tokens[: max(0, len(tokens) - again)]


def begun(cache: ModelCache, text: ModelCache) -> ModelCache:
    """An empty cache with the tokens of a cache of its `exact_specs`; the latter, if the specs are
    the same. See `begin`."""
    if text.specs == cache.specs:
        return text
    begin(cache, text)
    return cache


def begin(cache: ModelCache, text: ModelCache) -> None:
    """Let an empty cache begin with all tokens of a cache of its `exact_specs`.

    The next forward attends to all these tokens and then evicts; `settle` evicts without a forward.
    """
    for layer, own in zip(cache.layers, text.layers, strict=True):
        begin_with(layer, own)
    cache.carried.restore(text.carried.tensors(), text.fed)
    cache.routed, cache.activation = text.routed, text.activation


def settle(cache: ModelCache) -> None:
    """Evict down to the budgets."""
    for layer in cache.layers:
        layer.settle()
