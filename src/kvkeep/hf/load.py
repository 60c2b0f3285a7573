"""Load saved caches of transformers models, after seeing that the model is the same."""

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
    """Load a cache that `Cache.save` wrote; it goes on to the last bit as if never saved.

    Args:
        model: the model that is to go on with it.
        tokenizer: its tokenizer, to be compared too if the file knows one.
        force: take it even if it was made with another model of the same shape.
        verify: compare the checksums of all tensors.
        tokens: is given the token ids saved with it, (B, columns), or None.

    Raises:
        SavedCacheError: not a saved cache, not whole, of a newer version, or of another model, with
            what differs; or its specs cannot be, or need more memory than there is.
    """
    saved = Saved(path, verify=verify)
    differing = differences(saved.header.fingerprint, fingerprint(model, tokenizer))
    if differing and not force:
        raise SavedCacheError(
            f"{path} was made with another model: {'; '.join(differing)}; load the model it was "
            "made with, or give force=True and get what another model would have remembered"
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
