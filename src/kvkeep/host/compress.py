"""Compress: evict what a model does not need to repeat its own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvkeep.errors import ShapeError, SpecError, StateError
from kvkeep.host.cache import ModelCache
from kvkeep.host.contract import Host
from kvkeep.host.specs import Specs, per_layer
from kvkeep.layer.history import LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.rereading import Rereading
from kvkeep.planes import POSITION, Planes, joined, part, take
from kvkeep.policy import KVzip
from kvkeep.policy.ranking import lowest, rounded
from kvkeep.spec import CacheSpec

Tick = Callable[[int], None]
"""Called with the number of tokens that were read again since the last call."""


@torch.inference_mode()
def compress(
    host: Host,
    cache: ModelCache,
    ids: Tensor,
    spec: Specs | None = None,
    tick: Tick = lambda tokens: None,
) -> None:
    """Evict all but a share of the slots of a cache, whatever will be asked of the text later.

    The model reads the text once more, in parts, of which each attends to the cache's slots of the
    same part. Slots that get little attention are freed, more in some layers and heads than in
    others. Layers with a sliding window are left as they are.

    Args:
        host: of the model, which is attached.
        cache: holds every token that it was fed, in one row.
        ids: those tokens, int64 (n,) or (1, n).
        spec: of the policy `kvzip`, which the cache has from then on; None: the cache's own.

    Raises:
        SpecError: a layer's policy is not `kvzip`, or its codec encodes blocks of tokens.
        ShapeError: the ids are not those of the cache's tokens, or there is more than one row.
        StateError: some tokens are not held.
        UnsupportedError: the model cannot attend so. In all of these cases nothing has changed.
    """
    ids = ids.reshape(-1).to(host.device)
    specs = cache.specs if spec is None else per_layer(spec, host.kinds)
    policies = _chosen(cache, specs, host, len(ids))
    scores = _scores(host, cache, ids, policies, tick)
    _evict(cache, specs, policies, scores, len(ids))


def _chosen(
    cache: ModelCache, specs: Sequence[CacheSpec], host: Host, tokens: int
) -> dict[int, KVzip]:
    """The layers to compress, by index, with their policies."""
    if cache.rows != 1 or cache.layers[0].padded:
        raise ShapeError(
            f"compress a cache of {cache.rows} rows{' with padding' if cache.rows == 1 else ''}; "
            "select one row, without padding"
        )
    if tokens != cache.fed:
        raise ShapeError(f"{tokens} token ids for a cache that was fed {cache.fed}; give those")
    cache.states("compress")  # raises while a forward is running
    found = {}
    for index, (layer, one, kind) in enumerate(zip(cache.layers, specs, host.kinds, strict=True)):
        if kind.window is not None:
            continue
        if not isinstance(one.policy, KVzip):
            raise SpecError(
                f"compress with policy {one.policy.name}; give a spec such as kvzip:25%"
            )
        for codec in (layer.key_codec, layer.value_codec, one.key_codec, one.value_codec):
            if codec.block > 1:
                raise SpecError(
                    f"compress evicts single slots, but codec {codec.name} encodes blocks of "
                    "tokens; use int8 or int8/int4"
                )
        if layer.length != tokens or layer.history.floor:
            raise StateError(
                f"layer {index} holds {layer.length} of {tokens} tokens, or has evicted some: "
                "compress a cache of keep_all or kvzip, once"
            )
        found[index] = one.policy
    if not found:
        raise SpecError("every layer has a sliding window, which frees its slots itself")
    return found


def _scores(
    host: Host, cache: ModelCache, ids: Tensor, policies: dict[int, KVzip], tick: Tick
) -> dict[int, Tensor]:
    """The score of each token in the layers to compress, fp32 (1, H, n)."""
    chunk = min(policy.chunk for policy in policies.values())
    sinks = max(policy.sinks for policy in policies.values())
    tokens = len(ids)
    held = [layer.held() for layer in cache.layers]
    parts = -(-tokens // chunk)
    borders = [tokens * i // parts for i in range(parts + 1)]
    found: dict[int, list[Tensor]] = {index: [] for index in policies}
    for first, end in pairwise(borders):
        # Right after the part, so that no distance is greater than the model knows.
        runs = [(0, min(sinks, first)), (first, end)]
        layers = [
            Rereading(one, _reached(runs, len(one.position[0, 0]), tokens), end, layer.window)
            for one, layer in zip(held, cache.layers, strict=True)
            if one is not None
        ]
        host.feed_layers(ids[first:end], torch.arange(end, 2 * end - first), layers)
        for index in policies:
            largest = layers[index].largest
            assert largest is not None
            found[index].append(largest[:, :, runs[0][1] :].cpu())
        tick(end - first)
    return {index: torch.cat(scores, dim=2) for index, scores in found.items()}


def _reached(runs: list[tuple[int, int]], held: int, tokens: int) -> list[tuple[int, int]]:
    """Ranges of all tokens as ranges of the newest `held` ones."""
    lost = tokens - held
    return [(max(0, first - lost), max(0, end - lost)) for first, end in runs]


def _evict(
    cache: ModelCache,
    specs: Sequence[CacheSpec],
    policies: dict[int, KVzip],
    scores: dict[int, Tensor],
    tokens: int,
) -> None:
    kept = _kept(scores, policies, tokens)
    layers = list(cache.layers)
    for index, mask in kept.items():
        layer, one = layers[index], specs[index]
        new = one.layer(rotary=layer.rotary, index=index, count=len(layers))
        planes = _encoded(layer, new)
        heads = {
            f"head.{head}": _of_head(planes, head, mask[0, head].nonzero().flatten())
            for head in range(mask.shape[1])
        }
        history = layer.history
        history.floor = tokens
        new.restore(LayerState(history, heads))
        layers[index] = new
    cache.replace_layers(layers, specs)


def _kept(scores: dict[int, Tensor], policies: dict[int, KVzip], tokens: int) -> dict[int, Tensor]:
    """Which slots to keep, bool (1, H, n) for each layer: those of greatest score in all layers of
    the same policy, of equal scores the newest; if the policy is `uniform`, in each head."""
    kept: dict[int, Tensor] = {}
    for policy in dict.fromkeys(policies.values()):
        some = [index for index in scores if policies[index] == policy]
        # Slots of a head, on average.
        each = max(policy.share.of(tokens), min(policy.sinks, tokens))
        worth = torch.cat([rounded(scores[index])[0] for index in some])
        worth[:, : policy.sinks] = torch.inf
        if not policy.uniform:
            worth, each = worth.flatten(), each * len(worth)
        position = torch.arange(tokens).repeat(worth.shape[-1] // tokens).expand_as(worth)
        victims = lowest(worth, position, worth.shape[-1] - each)
        mask = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, victims, False)
        heads = [scores[index].shape[1] for index in some]
        masks = torch.split_with_sizes(mask.view(-1, tokens), heads)
        kept |= {index: one[None] for index, one in zip(some, masks, strict=True)}
    return kept


def _encoded(layer: LayerCache, new: LayerCache) -> Planes:
    """All slots of a layer, encoded as those of the new one."""
    planes = layer.slots.evictable()
    position = planes[POSITION]
    if (layer.key_codec, layer.value_codec) == (new.key_codec, new.value_codec):
        return {name: planes[name] for name in planes if name[0] in "kv" or name == POSITION}
    geometry = layer.history.geometry
    assert geometry is not None
    found = {POSITION: position}
    for name, before, after in (
        ("k", layer.key_codec, new.key_codec),
        ("v", layer.value_codec, new.value_codec),
    ):
        found |= joined(after.encode(before.decode(part(planes, name), geometry.dtype)), name)
    return found


def _of_head(planes: Planes, head: int, index: Tensor) -> Planes:
    """Some slots of one head."""
    own = {
        name: plane[:, head : head + 1] if plane.shape[1] > 1 else plane
        for name, plane in ((name, planes[name]) for name in planes)
    }
    return take(own, index[None, None].to(own[POSITION].device))
