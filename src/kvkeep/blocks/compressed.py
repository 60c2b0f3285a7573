"""Prompts with compressed blocks: each is compressed by itself, then moved to its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.attention import Centre
from kvkeep.blocks.join import moved, moving
from kvkeep.blocks.prefill import Assembled, Source, Span
from kvkeep.geometry import Geometry
from kvkeep.host import ModelCache, host_of
from kvkeep.host.cache import bytes_of
from kvkeep.host.compress import compressed_tokens, compresses
from kvkeep.layer.frozen import FrozenRuns, Run
from kvkeep.layer.history import LayerState
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Planes, concatenated, joined
from kvkeep.planes import part as own_planes
from kvkeep.rotary import Rotary
from kvkeep.store.identity import feed


def assemble_compressed(source: Source, tokens: Tensor, spans: Sequence[Span]) -> Assembled:
    """A cache of tokens under policy `kvzip`. Each span is computed and compressed by itself, or
    comes from the store, compressed. Tokens between spans are computed in place, attend to all kept
    slots before them, and are all kept. Without spans, all tokens are one compressed text.

    Args:
        tokens: int64 (n,), on the CPU.
        spans: in ascending order.
    """
    if not spans:
        whole = source.read(tokens)
        return Assembled(whole.cache, 0, whole.found, 0, 0.0, compressed_tokens(whole.cache))
    host = host_of(source.model)
    rotaries = moving(host)
    cache, found = host.new_cache(source.spec, capacity=source.capacity), 0
    for start, stop in spans:
        feed(host, tokens[cache.fed : start], cache)
        text = source.read(tokens[start:stop], whole_text=True)
        found += text.found
        for layer, own, rotary in zip(cache.layers, text.cache.layers, rotaries, strict=True):
            _append(layer, own.state(), rotary)
        cache.routed = text.cache.routed
    feed(host, tokens[cache.fed :], cache)
    compressed = sum(stop - start for start, stop in spans)
    return Assembled(cache, 0, found, 0, None, compressed)


def compressed_bytes(cache: ModelCache, geometries: Sequence[Geometry], tokens: int) -> int:
    """Bytes of a compressed text of `tokens` tokens; if the cache does not compress, bytes of all
    tokens."""
    if compresses(cache):
        wanted = [layer.policy.compression for layer in cache.layers]
        tokens = max(one.slots(tokens) for one in wanted if one is not None)
    return bytes_of(cache, geometries, tokens)


def _append(layer: LayerCache, text: LayerState, rotary: Rotary) -> None:
    """Append a compressed text, computed from position 0 on, to a layer's slots."""
    held, by = layer.state(), layer.fed
    parts: Mapping[str, Planes] = text.parts
    if by:
        assert text.history.geometry is not None  # the text has tokens
        dtype = text.history.geometry.dtype
        moved_parts = dict[str, Planes]()
        for name, planes in text.parts.items():
            run = moved(Run.of(planes), by, rotary)
            (placed,) = FrozenRuns([run], dtype).placed(layer.key_codec)
            placed = _recentred(layer, text, name, placed)
            moved_parts[name] = concatenated(held.parts[name], placed)
        parts = moved_parts
    history = (held if by else text).history.fork()
    history.columns = history.floor = by + text.history.columns
    history.joined = bool(by)
    layer.restore(LayerState(history, parts))


def _recentred(layer: LayerCache, text: LayerState, part: str, planes: Planes) -> Planes:
    """A part of a text's slots, at their positions in the layer, encoded with the layer's centre
    instead of the text's."""
    centre, held = layer.writer.centre, text.history.centre
    if centre is None or held is None:
        return planes
    own = Centre(held, layer.centring.turns_for(held, layer.fed + text.history.columns))
    if part.startswith("head."):
        head = int(part.removeprefix("head."))
        centre, own = centre.of_head(head), own.of_head(head)
    keys = layer.key_codec.decode(own_planes(planes, "k"), torch.float32)
    keys = centre.without(own.added(keys, planes[POSITION]), planes[POSITION])
    return {**planes, **joined(layer.key_codec.encode(keys), "k")}
