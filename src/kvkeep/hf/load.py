"""Load saved caches of transformers models, after checking that the model is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvkeep.errors import CapacityError, SavedCacheError, SpecError, UnsupportedError
from kvkeep.files.snapshot import Saved
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import base_config, decoder_config
from kvkeep.hf.fingerprint import fingerprint
from kvkeep.host.fingerprint import differences
from kvkeep.storage.allocate import SHORTAGE


def load(
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    force: bool = False,
    verify: bool = True,
    tokens: Callable[[Tensor | None], None] = lambda _: None,
) -> Cache:
    """Load a cache that `Cache.save` wrote. Its results are bit-identical to those of the original
    cache.

    Args:
        model: the model to use the cache with.
        tokenizer: the model's tokenizer, compared if the file has a tokenizer's hashes.
        force: load the cache even if it was made with another model of the same shape.
        verify: compare the checksums of all tensors.
        tokens: called with the token ids saved with the cache, (B, columns), or None.

    Raises:
        SavedCacheError: the file is not a saved cache, is incomplete, has a newer format, or is of
            another model (the error says what differs); or its specs are invalid or need more
            memory than is available.
    """
    saved = Saved(path, verify=verify)
    differing = differences(saved.header.fingerprint, fingerprint(model, tokenizer))
    if differing and not force:
        raise SavedCacheError(
            f"{path} was made with another model: {'; '.join(differing)}; load the model it was "
            "made with, or give force=True to use another model's keys and values"
        )
    layers = len(saved.header.specs)
    expected = decoder_config(base_config(model)).num_hidden_layers
    if layers != expected:
        raise SavedCacheError(f"{path} holds {layers} layers, the model has {expected}")
    try:
        cache = Cache(model, saved.header.specs, capacity=saved.header.capacity)
        saved.restore_to(cache, next(model.parameters()).device)
    except SavedCacheError:
        raise
    except (SpecError, CapacityError, UnsupportedError, *SHORTAGE) as error:
        raise SavedCacheError(f"{path} cannot be loaded: {error}; save it again") from error
    tokens(saved.tokens)
    return cache
