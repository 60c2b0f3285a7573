"""Save a model's cache to a file, and load it again for the same model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvkeep.cache import note_tokens
from kvkeep.errors import CapacityError, SavedCacheError, SpecError, UnsupportedError
from kvkeep.files import snapshot
from kvkeep.files.snapshot import Saved
from kvkeep.host.cache import ModelCache
from kvkeep.host.contract import Host
from kvkeep.host.fingerprint import HOOKS, LIBRARY, differences
from kvkeep.host.registry import host_of
from kvkeep.host.specs import from_saved
from kvkeep.host.translation import translated
from kvkeep.storage.allocate import SHORTAGE


def save(
    cache: ModelCache,
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokens: Tensor | None = None,
    notes: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    sync: bool = True,
    private: bool = False,
) -> None:
    """Write a cache to a file, for `kvkeep.load`; an existing file is replaced atomically.

    Args:
        model: the model of the cache, of any library that kvkeep knows.
        tokens: the fed token ids, (B, columns), to store in the file.
        notes: texts to store in the file, by name.
        tokenizer: the tokenizer, whose hashes `load` can compare.
        sync: fsync the file, so that it survives a loss of power.
        private: make a new file readable by its owner only.

    Raises:
        StateError: the cache is empty, or a forward is running.
        SavedCacheError: the file cannot be written; an existing file is unchanged.
    """
    snapshot.save(
        cache,
        path,
        specs=[str(spec) for spec in cache.specs],
        fingerprint=host_of(model).fingerprint(tokenizer),
        tokens=tokens,
        notes=notes,
        sync=sync,
        private=private,
    )


def load(
    path: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    scorer: str | os.PathLike[str] | None = None,
    force: bool = False,
    verify: bool = True,
    tokens: Callable[[Tensor | None], None] = lambda _: None,
) -> Any:
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
    host, saved = host_of(model), Saved(path, verify=verify)
    differing = [] if force else _differing(saved.header.fingerprint, host, tokenizer)
    if differing:
        raise SavedCacheError(
            f"{path} was made with another model: {'; '.join(differing)}; load the original model, "
            "or give force=True to use another model's keys and values"
        )
    layers, expected = len(saved.header.specs), len(host.kinds)
    if layers != expected:
        raise SavedCacheError(f"{path} holds {layers} layers, the model has {expected}")
    specs = from_saved(saved.header.specs, scorer, path)
    try:
        cache = host.new_cache(specs, capacity=saved.header.capacity)
        saved.restore_to(cache, host.devices(), host.recurrent_specs())
    except SavedCacheError:
        raise
    except (SpecError, CapacityError, UnsupportedError, *SHORTAGE) as error:
        remedy = "save it again" if scorer is None else "give the original scorer"
        raise SavedCacheError(f"{path} cannot be loaded: {error}; {remedy}") from error
    fed = saved.tokens
    if fed is not None:
        note_tokens(cache, fed)
    tokens(fed)
    return cache


def _differing(recorded: Mapping[str, str], host: Host, tokenizer: Any) -> list[str]:
    """The differences between a model and a recorded fingerprint; empty if there are none."""
    now = host.fingerprint(tokenizer)
    found = differences(recorded, now)
    if not found:
        return []
    elsewhere = translated(recorded, host, tokenizer)
    if elsewhere is not None:
        return elsewhere + [one for one in found if one.startswith(HOOKS)]
    if recorded.get(LIBRARY) != now.get(LIBRARY):
        return [
            "it was made with a model of another library, and kvkeep cannot compare its weights "
            f"with those of this {host.library} model"
        ]
    return found
