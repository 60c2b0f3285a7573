"""Load a saved cache, after checking that the model is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from kvkeep.hf.cache import Cache
from kvkeep.host import saving


def load(
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    scorer: str | os.PathLike[str] | None = None,
    force: bool = False,
    verify: bool = True,
    tokens: Callable[[Tensor | None], None] = lambda _: None,
) -> Cache:
    """Load a cache that `Cache.save` wrote. Its results are bit-identical to those of the original
    cache.

    Args:
        model: the model to use the cache with. For a model of another library than transformers,
            the cache is a `kvkeep.host.ModelCache`.
        tokenizer: the model's tokenizer, compared if the file has a tokenizer's hashes.
        scorer: the scorer of a cache with the policy kvzap. The file has the scorer's hash, which
            is compared; the path in its spec is never opened.
        force: load the cache even if it was made with another model of the same shape.
        verify: compare the checksums of all tensors.
        tokens: called with the token ids saved with the cache, (B, columns), or None.

    Raises:
        SavedCacheError: the file is not a saved cache, is incomplete, has a newer format, or is of
            another model (the error says what differs) or another scorer; or its specs are invalid
            or need more memory than is available.
    """
    found = saving.load(
        path, model, tokenizer=tokenizer, scorer=scorer, force=force, verify=verify, tokens=tokens
    )
    return cast(Cache, found)
