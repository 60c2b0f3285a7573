"""Builds a cache from texts that were computed at other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.blocks import recomputation
from kvkeep.blocks.join import join_at
from kvkeep.blocks.recompute_option import Recompute, parsed
from kvkeep.cache import note_tokens
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compresses
from kvkeep.store import PrefixStore
from kvkeep.store.beginning import begun, exact_specs
from kvkeep.store.identity import flat
from kvkeep.store.prefix import Reading

_SAMPLED = 64  # tokens sampled to estimate the deviation


class Span(NamedTuple):
    """Tokens `start` to `stop`, exclusive."""

    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """Where texts are read: by `model` through `store`, to caches of `spec` and `capacity`, with
    the store's entries in `namespace`."""

    model: Any
    store: PrefixStore
    spec: Specs = "keep_all"
    namespace: str = ""
    capacity: int | None = None

    def read(
        self, tokens: Tensor, prompt: Tensor | None = None, *, whole_text: bool = False
    ) -> Reading:
        """See `kvkeep.PrefixStore.read`."""
        return self.store.read(
            self.model,
            tokens,
            prompt=prompt,
            spec=self.spec,
            namespace=self.namespace,
            capacity=self.capacity,
            whole_text=whole_text,
        )


class Assembled(NamedTuple):
    """A cache, and the sources of its tokens.

    Args:
        exact: number of tokens found as a stored prefix.
        found: number of tokens found as stored spans.
        repaired: number of tokens of spans that were recomputed.
        deviation: distance from a plain prefill, for tokens of spans that were not recomputed: the
            relative norm of the difference of keys and values in the second layer, over a sample.
            None: not estimated.
        compressed: number of tokens of compressed texts.
    """

    cache: ModelCache
    exact: int
    found: int
    repaired: int
    deviation: float | None
    compressed: int = 0


def prefill(
    model: Any,
    texts: Sequence[Tensor],
    *,
    recompute: Recompute = 0,
    spec: Specs = "keep_all",
    store: PrefixStore | None = None,
    namespace: str = "",
) -> ModelCache:
    """A cache of several texts in sequence, each computed separately.

    Args:
        model: the model; it must be attached to recompute tokens.
        texts: token ids, int64 (n,), none empty; only the first should begin with a BOS token.
        recompute: which tokens of the texts after the first are recomputed, attending to all tokens
            before them. 0: no tokens (block-diagonal attention). "boundary:k": the first k tokens
            of each text. A share, such as 0.15: the tokens whose keys and values would change most
            (CacheBlend). "all": all tokens, which equals a plain prefill.
        spec: spec of the cache. With a budget, the next forward sees all tokens, then evicts.
        store: the store for computed texts.
        namespace: namespace of the store's entries.

    Raises:
        ShapeError: no texts, or an empty text.
        SpecError: `recompute` is invalid.
        UnsupportedError: see `join`.
    """
    if not texts or any(text.dim() != 1 or not len(text) for text in texts):
        raise ShapeError(f"{[tuple(text.shape) for text in texts]}: give texts (n,), none empty")
    bounds = accumulate((len(text) for text in texts), initial=0)
    _, *spans = (Span(*ends) for ends in pairwise(bounds))
    tokens = torch.cat(list(map(flat, texts)))
    cache = host_of(model).new_cache(spec)
    if compresses(cache):
        raise UnsupportedError(
            "texts of token ids are joined with all their slots; for kvzip use a kvkeep.blocks."
            "Prompt with a Block for each text, or keep_all"
        )
    source = Source(model, store or PrefixStore(), exact_specs(cache.specs), namespace)
    first = len(texts[0])
    text = assemble(source, tokens, spans, first=first, recompute=recompute, estimate=False).cache
    return begun(cache, text)


def assemble(
    source: Source,
    tokens: Tensor,
    spans: Sequence[Span],
    *,
    first: int,
    recompute: Recompute,
    prompt: Tensor | None = None,
    estimate: bool = True,
) -> Assembled:
    """A cache of tokens. Each span is computed by itself; tokens between spans are computed in
    place, attending to all tokens before them.

    Args:
        tokens: int64 (n,), on the CPU.
        spans: in ascending order, none before `first`.
        first: number of leading tokens, at least 1, computed as a plain prefix.
        recompute: see `prefill`.
        prompt: see `kvkeep.PrefixStore.read`. No span may contain an adapter's invocation.
        estimate: whether to estimate the deviation, by running a few tokens through two layers.
    """
    mode, amount = parsed(recompute)
    host = host_of(source.model)
    prompt = tokens if prompt is None else prompt
    if mode == "all" or not spans:
        whole = source.read(tokens, prompt)
        return Assembled(whole.cache, whole.found, 0, 0, 0.0)
    beginning = Span(0, first)
    kinds = _kinds(len(tokens), [beginning, *spans])
    certain = kinds == _BETWEEN
    if mode != "none" or bool(certain.any()):
        empty = host.new_cache(source.spec, capacity=source.capacity)
        recomputation.require_repairable(host, empty)
    leading = source.read(tokens[:first], prompt)
    others = [source.read(tokens[start:stop], prompt[:0]) for start, stop in spans]
    spans = [beginning, *spans]
    caches = [leading.cache, *(other.cache for other in others)]
    cache = join_at(host, caches, [span.start for span in spans], len(tokens))
    cache.activation = leading.cache.activation
    if mode == "boundary":
        for start, stop in spans[1:]:
            certain[start : min(start + int(amount), stop)] = True
    more = round(amount * int((kinds == _SPAN).sum())) if mode == "share" else 0
    deviation = None
    computed = certain.nonzero().flatten()
    # A forward needs at least one token that goes through every layer.
    if more or (estimate and len(computed) and not recomputation.why_not_compared(host)):
        sample = ((kinds == _SPAN) & ~certain).nonzero().flatten()
        if mode != "share":
            sample = sample[:: max(1, len(sample) // _SAMPLED)]
        candidates = torch.cat([computed, sample]).sort().values
        computed, deviation = recomputation.blend(
            host, cache, tokens, candidates, certain=certain[candidates], count=more
        )
    elif len(computed):
        recomputation.recompute(host, cache, tokens, computed)
    note_tokens(cache, tokens[None])
    repaired = int((kinds[computed] == _SPAN).sum())
    found = sum(other.found for other in others)
    return Assembled(cache, leading.found, found, repaired, deviation)


_FIRST, _SPAN, _BETWEEN = range(3)


def _kinds(count: int, spans: Sequence[Span]) -> Tensor:
    """For each token: `_FIRST`, in the first span; `_SPAN`, in a later span; or `_BETWEEN`."""
    kinds = torch.full((count,), _BETWEEN)
    for index, (start, stop) in enumerate(spans):
        kinds[start:stop] = _SPAN if index else _FIRST
    return kinds
