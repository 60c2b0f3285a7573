"""Compress: evict the slots that a model does not need to repeat its own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.attention import Held, Segment, View, dispatch
from kvkeep.codec import Plain
from kvkeep.errors import ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.host.cache import ModelCache, needed_rotaries
from kvkeep.host.specs import Specs, per_layer
from kvkeep.layer.attending import AttendingLayer
from kvkeep.layer.history import History, LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.parted import of_heads
from kvkeep.layer.step import Slopes, StepInputs, require_causal
from kvkeep.planes import POSITION, Chunks, OwnWindow, Planes, Reach
from kvkeep.policy import Compression
from kvkeep.policy.kvzip import KVzip
from kvkeep.policy.ranking import lowest, rounded
from kvkeep.policy.share import Share
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec

if TYPE_CHECKING:
    from kvkeep.host.contract import Host


@torch.inference_mode()
def compress(host: Host, cache: ModelCache, ids: Tensor, spec: Specs | None = None) -> None:
    """Evict a share of a cache's slots, chosen without knowledge of later questions.

    The model reads the text once more, in parts; each part attends to the cache's slots of the same
    part. Slots that receive little attention are freed; the share may differ between layers and
    heads. Layers with a sliding window do not change. Rows are scored separately; memory is freed
    for the slots of a head that no row keeps.

    Args:
        host: the host of an attached model.
        cache: a cache that holds every token it was fed, without padding.
        ids: the tokens that the cache was fed, int64 (B, n), or (n,) for one row.
        spec: the cache's new spec, of policy `kvzip`; None: the cache's own.

    Raises, before anything changes:
        SpecError: a layer's policy is not `kvzip`, or its codec encodes blocks of tokens.
        ShapeError: `ids` and the cache's tokens differ in shape, or a row has padding.
        StateError: the cache lacks some tokens.
        UnsupportedError: the model cannot attend to given layers.
    """
    ids = (ids if ids.dim() > 1 else ids[None]).to(host.device)
    specs = cache.specs if spec is None else per_layer(spec, host.kinds)
    policies = _chosen(cache, specs, host, ids)
    of_rows = [reread(host, cache, row, ids[row], policies) for row in range(len(ids))]
    kept = [_kept(scores, policies, ids.shape[1]) for scores in of_rows]
    masks = {i: torch.cat([one[i] for one in kept]) for i in policies}
    _evict(cache, specs, masks, needed_rotaries(specs, host.rotaries))


def compresses(cache: ModelCache) -> bool:
    """Whether a cache's policy compresses, and the cache is not compressed yet."""
    return any(layer.policy.compression and not layer.history.floor for layer in cache.layers)


def compressed_tokens(cache: ModelCache) -> int:
    """The number of fed tokens that were compressed."""
    floors = (layer.history.floor for layer in cache.layers if layer.policy.compression)
    return max(floors, default=0)


@torch.inference_mode()
def stop_evicting(cache: ModelCache) -> None:
    """Let a cache keep the slots that it holds now, and every later token; later queries see all of
    them. Layers with a sliding window do not change.

    Raises:
        StateError: a forward is running.
    """
    cache.mend("stop_evicting")
    specs = list(cache.specs)
    some = [
        index
        for index, layer in enumerate(cache.layers)
        if layer.window is None and (layer.policy.evicts or layer.policy.reach is not None)
    ]
    for index in some:
        specs[index] = replace(specs[index], policy=KVzip(Share(1)))
    _evict(cache, specs, dict.fromkeys(some), [layer.rotary for layer in cache.layers])


@torch.inference_mode()
def read(host: Host, cache: ModelCache, ids: Tensor, chunk: int | None = None) -> None:
    """Feed a cache the rest of ids (B, n), in chunks; then compress it, if its policy does."""
    left = ids[:, cache.fed :]
    for piece in torch.split(left, chunk or left.shape[1], dim=1) if left.numel() else ():
        host.feed(piece, cache)
    if compresses(cache):
        compress(host, cache, ids)


def _chosen(
    cache: ModelCache, specs: Sequence[CacheSpec], host: Host, ids: Tensor
) -> dict[int, Compression]:
    """The layers to compress, by index, with their policies."""
    tokens = cache.fed
    if tuple(ids.shape) != (cache.rows, tokens):
        raise ShapeError(
            f"token ids {tuple(ids.shape)} for a cache that was fed {(cache.rows, tokens)}; give "
            "the ids that it was fed"
        )
    if cache.layers[0].padded:
        raise ShapeError("compress a cache of rows with padding; feed each row without padding")
    cache.mend("compress")
    found = {}
    for index, (layer, one, kind) in enumerate(zip(cache.layers, specs, host.kinds, strict=True)):
        if kind.window is not None:
            continue
        compression = one.policy.compression
        if compression is None:
            raise SpecError(
                f"compress with policy {one.policy.name}; give a spec such as kvzip:25%"
            )
        for codec in (layer.key_codec, layer.value_codec, one.key_codec, one.value_codec):
            if codec.block > 1:
                raise SpecError(
                    f"compress evicts single slots, but codec {codec.name} encodes blocks of "
                    "tokens; use int8 or int8/int4"
                )
        if layer.history.embedded:
            raise StateError(
                "compress reads a text again by its token ids, and this cache was fed images, "
                "sound or embeddings, or keys computed elsewhere; evict from it by another policy, "
                "such as snapkv"
            )
        if layer.length != tokens or layer.history.floor:
            raise StateError(
                f"layer {index} holds {layer.length} of {tokens} tokens, or has evicted some: "
                "compress a cache of keep_all or kvzip, once"
            )
        found[index] = compression
    if not found:
        raise SpecError("every layer has a sliding window, which frees its slots itself")
    return found


def reread(
    host: Host, cache: ModelCache, row: int, ids: Tensor, policies: dict[int, Compression]
) -> dict[int, Tensor]:
    """The score of each token of one row in the layers to compress, fp32 (1, H, n), on the CPU.

    Args:
        cache: holds every token of the row.
        ids: the row's tokens, int64 (n,).
        policies: the policies of the layers to compress, by layer index.
    """
    chunk = min(policy.chunk for policy in policies.values())
    sinks = max(policy.sinks for policy in policies.values())
    tokens = len(ids)
    held = [_of_row(layer, row) for layer in cache.layers]
    parts = -(-tokens // chunk)
    borders = [tokens * i // parts for i in range(parts + 1)]
    found: dict[int, list[Tensor]] = {index: [] for index in policies}
    for first, end in pairwise(borders):
        # Right after the part, so that no distance exceeds the model's context.
        runs = [(0, min(sinks, first)), (first, end)]
        layers = [
            Rereading(
                one,
                _reached(runs, len(one.position[0, 0]), tokens),
                end,
                *(layer.window, layer.slopes),
            )
            for one, layer in zip(held, cache.layers, strict=True)
        ]
        host.feed_layers(ids[first:end], torch.arange(end, 2 * end - first), layers)
        for index in policies:
            largest = layers[index].largest
            assert largest is not None
            found[index].append(largest[:, :, runs[0][1] :].cpu())
    return {index: torch.cat(scores, dim=2) for index, scores in found.items()}


def _of_row(layer: LayerCache, row: int) -> Held:
    held = layer.held()
    assert held is not None  # `_chosen`
    return Held(*(x[row : row + 1] for x in held[:3]))


def _reached(runs: list[tuple[int, int]], held: int, tokens: int) -> list[tuple[int, int]]:
    """Ranges of all tokens, converted to ranges of the newest `held` tokens."""
    lost = tokens - held
    return [(max(0, first - lost), max(0, end - lost)) for first, end in runs]


def _evict(
    cache: ModelCache,
    specs: Sequence[CacheSpec],
    kept: Mapping[int, Tensor | None],
    rotaries: Sequence[Rotary | None],
) -> None:
    """Replace layers by layers of `specs` with the kept tokens, bool (B, H, n) for each layer;
    None: all. `rotaries`: of all layers."""
    layers = list(cache.layers)
    for index, masks in kept.items():
        layer, one = layers[index], specs[index]
        new = one.layer(
            rotary=rotaries[index],
            index=index,
            count=len(layers),
            slopes=layer.slopes,
            latent=layer.latent,
        )
        history = layer.history
        parts = _parts(layer, new, history)
        history.floor = history.columns
        new.restore(LayerState(history, parts))
        new.settle()  # encodes tokens that do not stay in a plain tail
        if masks is None:
            masks = torch.ones(history.rows, _heads(history), history.columns, dtype=torch.bool)
        with new.cursor.turn, new.cursor.moved():
            new.slots.free(~masks)
        layers[index] = new
    cache.replace_layers(layers, specs)


def _kept(
    scores: dict[int, Tensor], policies: dict[int, Compression], tokens: int
) -> dict[int, Tensor]:
    """The slots to keep, bool (1, H, n) for each layer: the slots with the highest scores, the
    newest of equal ones. All layers of one policy compete; if the policy is `uniform`, only the
    slots of one head do."""
    kept: dict[int, Tensor] = {}
    for policy in dict.fromkeys(policies.values()):
        some = [index for index in scores if policies[index] == policy]
        each = policy.slots(tokens)
        worth = torch.cat([rounded(scores[index])[0] for index in some])
        worth[:, : policy.sinks] = torch.inf
        recent = min(policy.recent, (each - policy.sinks) // 2)
        worth[:, tokens - max(0, recent) :] = torch.inf
        if not policy.uniform:
            worth, each = worth.flatten(), each * len(worth)
        position = torch.arange(tokens).repeat(worth.shape[-1] // tokens).expand_as(worth)
        victims = lowest(worth, position, worth.shape[-1] - each)
        mask = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, victims, False)
        heads = [scores[index].shape[1] for index in some]
        masks = torch.split_with_sizes(mask.view(-1, tokens), heads)
        kept |= {index: one[None] for index, one in zip(some, masks, strict=True)}
    return kept


def _parts(layer: LayerCache, new: LayerCache, history: History) -> dict[str, Planes]:
    """All slots of a layer as parts of the new layer; the new `history` receives its centre."""
    late, heads = new.slots.late, _heads(history)
    given = history.centre is None and layer.key_codec.centre  # its keys are plain and whole
    if layer.codecs == new.codecs and late == layer.slots.late and not given:
        found: dict[str, Planes] = {}
        for name, planes in layer.slots.parts().items():
            own = {x: planes[x] for x in planes if x[0] in "kv" or x == POSITION}
            if name.startswith("head."):
                found[name] = own
            elif late and name == "slots":
                found[name] = own | {POSITION: own[POSITION].expand(-1, heads, -1)}
            else:
                found |= of_heads(own, heads)
        return found
    held = layer.held()
    assert held is not None
    k, v, position = held[:3]
    centre = new.centring.of_new(k, position[:, 0], History())
    k = k if centre is None else centre.without(k, position)
    history.centre = None if centre is None else centre.held
    if not late:
        return of_heads({POSITION: position} | new.codecs.encode(k, v), heads)
    plain = new.slots.codecs.encode(k.to(v.dtype), v)
    return {"slots": {POSITION: position.expand(-1, heads, -1)} | plain}


def _heads(history: History) -> int:
    assert history.geometry is not None  # `_chosen`
    return history.geometry.heads


class Rereading(AttendingLayer):
    """Attends to some of a layer's tokens and to its own chunk. Nothing is written.

    Args:
        held: all tokens of one row, in the order of their positions.
        runs: the tokens to attend to, as ascending index ranges (first, end) of `held`.
        start: the position of the chunk's first token.
        window: the layer's own sliding window; None: no window. Only then weights are recorded.
        slopes: the layer's slopes (ALiBi); None: no slopes.
    """

    window: OwnWindow | None

    def __init__(
        self,
        held: Held,
        runs: list[tuple[int, int]],
        start: int,
        window: OwnWindow | None,
        slopes: Slopes | None,
    ) -> None:
        self.window, self._start, self._slopes = window, start, slopes
        self._past = tuple(
            _segment(*(x[:, :, first:end] for x in held[:3])) for first, end in runs if first < end
        )
        self.largest: Tensor | None = None
        """The largest weight that each token of `runs` received, fp32 (1, H, tokens)."""

    def next_positions(self, n: int, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Positions of the chunk: int32 (n,)."""
        if real is not None:
            raise UnsupportedError("the second reading of a text has no padding")
        return torch.arange(self._start, self._start + n, dtype=torch.int32, device=device)

    def run(self, inputs: StepInputs) -> Tensor:
        """Attention of the chunk: (1, Hq, n, Dv)."""
        require_causal(inputs)
        q, k, v, position = inputs[:4]
        if position is None:
            position = self.next_positions(q.shape[2], q.device)
        segments = (*self._past, _segment(k, v, position.reshape(1, 1, -1)))
        position, window = position.flatten(), self.window
        view = View(segments, position, False)
        if isinstance(window, Chunks):
            first = position + 1 - window.behind(position)
            view = view._replace(bounds=torch.stack([first, position]))
        elif window is not None:
            view = view._replace(reaches=(Reach(window),))
        observed = window is None
        options = inputs.options(self._slopes, need_mass=observed, peak=observed)
        out, weights = dispatch(q, view, options)
        if weights is not None:
            self.largest = weights[:, :, : weights.shape[2] - q.shape[2]]
        return out


def _segment(k: Tensor, v: Tensor, position: Tensor) -> Segment:
    return Segment({"k": k, "v": v, POSITION: position.int()}, Plain(), Plain())
