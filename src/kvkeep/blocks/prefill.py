"""A cache of tokens, some runs of which were computed by themselves, wherever they stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.blocks import recomputation
from kvkeep.blocks.join import join_at
from kvkeep.blocks.recompute_option import Recompute, parsed
from kvkeep.errors import ShapeError
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.store import PrefixStore
from kvkeep.store.identity import flat
from kvkeep.store.prefix import Reading

_SAMPLED = 64  # tokens of which is told how far they are from what reading gives


class Span(NamedTuple):
    """Tokens from `start` to before `stop`."""

    start: int
    stop: int


class Assembled(NamedTuple):
    """A cache, and how it came to be: how many of its tokens were found as the beginning of other
    texts, how many in spans that were found, how many of those in spans were computed again, and
    how far the keys and values of the others are from what reading everything gives (a relative
    norm in the second layer, of a sample; None where nothing tells)."""

    cache: ModelCache
    exact: int
    found: int
    repaired: int
    deviation: float | None


def prefill(
    model: Any,
    texts: Sequence[Tensor],
    *,
    recompute: Recompute = 0,
    spec: Specs = "keep_all",
    store: PrefixStore | None = None,
    namespace: str = "",
) -> ModelCache:
    """A cache of texts, one behind the other, each of which was computed by itself.

    Args:
        model: attached, where tokens are to be computed again.
        texts: token ids, int64 (n,), none empty; only the first may begin with a BOS token.
        recompute: which tokens of all texts but the first are computed again, knowing what stands
            before them. 0: none, so that texts see themselves only (block-diagonal attention).
            "boundary:k": the first k of each. A share, such as 0.15: those that differ most from
            what they would be (CacheBlend). "all": all, which is the plain prefill.
        spec: of the cache; it must keep all tokens.
        store: where texts are found that were computed before, and kept.
        namespace: of its entries.

    Raises:
        ShapeError: no texts, or an empty one.
        SpecError: a `recompute` that is none of these.
        UnsupportedError: see `join`.
    """
    if not texts or any(text.dim() != 1 or not len(text) for text in texts):
        raise ShapeError(f"{[tuple(text.shape) for text in texts]}: give texts (n,), none empty")
    bounds = accumulate((len(text) for text in texts), initial=0)
    _, *spans = (Span(*ends) for ends in pairwise(bounds))
    tokens = torch.cat(list(map(flat, texts)))
    return assemble(
        model,
        tokens,
        spans,
        first=len(texts[0]),
        recompute=recompute,
        spec=spec,
        store=store or PrefixStore(),
        namespace=namespace,
        estimate=False,
    ).cache


def assemble(
    model: Any,
    tokens: Tensor,
    spans: Sequence[Span],
    *,
    first: int,
    recompute: Recompute,
    spec: Specs,
    store: PrefixStore,
    namespace: str = "",
    prompt: Tensor | None = None,
    capacity: int | None = None,
    estimate: bool = True,
) -> Assembled:
    """A cache of tokens, of which each span was computed by itself; what stands between spans is
    computed where it stands, after all before it.

    Args:
        tokens: int64 (n,), on the CPU.
        spans: ascending, none before `first`.
        first: so many tokens, at least 1, are read as they are, before all else.
        recompute: see `prefill`.
        prompt: see `kvkeep.PrefixStore.read`; in spans there is no invocation.
        capacity: see `kvkeep.Cache`.
        estimate: say how far off what was not computed again is, which costs a few tokens in two
            layers.
    """
    mode, amount = parsed(recompute)
    host = host_of(model)
    prompt = tokens if prompt is None else prompt

    def read(start: int, stop: int, prompt: Tensor) -> Reading:
        return store.read(
            model,
            tokens[start:stop],
            prompt=prompt,
            spec=spec,
            namespace=namespace,
            capacity=capacity,
        )

    if mode == "all" or not spans:
        whole = read(0, len(tokens), prompt)
        return Assembled(whole.cache, whole.found, 0, 0, 0.0)
    begins = Span(0, first)
    kinds = _kinds(len(tokens), [begins, *spans])
    certain = kinds == _BETWEEN
    if mode != "none" or bool(certain.any()):
        recomputation.require_repairable(host, host.new_cache(spec, capacity=capacity))
    begun = read(0, first, prompt)
    others = [read(start, stop, prompt[:0]) for start, stop in spans]
    spans = [begins, *spans]
    caches = [begun.cache, *(other.cache for other in others)]
    cache = join_at(host, caches, [span.start for span in spans], len(tokens))
    cache.activation = begun.cache.activation
    if mode == "boundary":
        for start, stop in spans[1:]:
            certain[start : min(start + int(amount), stop)] = True
    more = round(amount * int((kinds == _SPAN).sum())) if mode == "share" else 0
    deviation = None
    computed = certain.nonzero().flatten()
    # Without a token that is computed in every layer there is no forward that could tell.
    if more or (estimate and len(computed) and recomputation.compares(host)):
        sample = ((kinds == _SPAN) & ~certain).nonzero().flatten()
        if mode != "share":
            sample = sample[:: max(1, len(sample) // _SAMPLED)]
        candidates = torch.cat([computed, sample]).sort().values
        computed, deviation = recomputation.blend(
            host, cache, tokens, candidates, certain=certain[candidates], count=more
        )
    elif len(computed):
        recomputation.recompute(host, cache, tokens, computed)
    repaired = int((kinds[computed] == _SPAN).sum())
    found = sum(other.found for other in others)
    return Assembled(cache, begun.found, found, repaired, deviation)


_FIRST, _SPAN, _BETWEEN = range(3)


def _kinds(count: int, spans: Sequence[Span]) -> Tensor:
    """Of each token: whether it is in the first span, in a later one, or in none."""
    kinds = torch.full((count,), _BETWEEN)
    for index, (start, stop) in enumerate(spans):
        kinds[start:stop] = _SPAN if index else _FIRST
    return kinds
