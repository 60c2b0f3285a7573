"""A cache of several texts, each of which is computed once, wherever it stands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.blocks import repair
from kvkeep.blocks.join import join
from kvkeep.errors import ShapeError, SpecError
from kvkeep.hf.cache import Cache
from kvkeep.hf.specs import Specs
from kvkeep.store import PrefixStore

Recompute = int | float | str
"""0; a share of the tokens, above 0 and below 1; "boundary:32"; or "all"."""


def prefill(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    recompute: Recompute = 0,
    spec: Specs = "keep_all",
    store: PrefixStore | None = None,
    namespace: str = "",
) -> Cache:
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
    mode, amount = _mode(recompute)
    store = store or PrefixStore()
    if mode == "all":
        texts = [torch.cat(list(texts))]
    # `prefill` leaves the last token to whoever asks what comes next.
    caches = [
        store.prefill(model, torch.cat([text, text[-1:]]), spec=spec, namespace=namespace)
        for text in texts
    ]
    if len(caches) == 1:
        return caches[0]
    cache = join(model, caches)
    tokens = torch.cat(list(texts)).to("cpu", torch.int64)
    starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(dim=0).tolist()
    if mode == "boundary":
        firsts = [
            torch.arange(start, min(start + int(amount), stop))
            for start, stop in pairwise(starts[1:])
        ]
        repair.recompute(model, cache, tokens, torch.cat(firsts))
    elif mode == "share":
        count = max(1, round(amount * (len(tokens) - starts[1])))
        repair.blend(model, cache, tokens, starts[1], count)
    return cache


def _mode(recompute: Recompute) -> tuple[str, float]:
    if recompute == "all":
        return "all", 1
    if isinstance(recompute, str):
        name, _, count = recompute.partition(":")
        if name == "boundary" and count.isdigit() and int(count):
            return name, int(count)
    elif recompute == 0 or 0 < recompute < 1:
        return ("share" if recompute else "none"), recompute
    raise SpecError(
        f"recompute={recompute!r}; give 0, a share such as 0.15, 'boundary:32' or 'all'"
    )
