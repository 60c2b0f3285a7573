"""A batch of prompts: the tokens with which all of them begin are computed and held once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compresses
from kvkeep.store.beginning import begin, exact_specs, observed_again
from kvkeep.store.identity import flat
from kvkeep.store.tree import common

if TYPE_CHECKING:
    from kvkeep.store.prefix import PrefixStore

_SHORTEST = 16  # tokens that are worth a forward of their own


def shared_beginning(
    store: PrefixStore,
    model: Any,
    prompts: Sequence[Tensor],
    *,
    spec: Specs,
    namespace: str,
    chunk: int | None,
    capacity: int | None,
) -> ModelCache | None:
    """See `kvkeep.PrefixStore.prefill_rows`."""
    host, prompts = host_of(model), list(map(flat, prompts))
    if not prompts or not min(map(len, prompts)):
        raise ShapeError(f"prompts of {list(map(len, prompts))} tokens; give at least one of each")
    cache = host.new_cache(spec, capacity=capacity)
    if compresses(cache):
        raise UnsupportedError("kvzip compresses one text; read each prompt by itself")
    if any(host.activation_in(prompt) is not None for prompt in prompts):
        raise UnsupportedError(
            "an activated adapter computes from another token on in each prompt; read each prompt "
            "by itself"
        )
    exact = exact_specs(cache.specs)
    most = min(map(len, prompts)) - max(1, observed_again(cache))
    tokens = prompts[0][: max(0, min(most, *(common(prompts[0], one) for one in prompts)))]
    if len(tokens) < _SHORTEST or not store.has_room(host, exact, tokens, namespace):
        return None
    text = store.read(
        model, tokens, spec=exact, namespace=namespace, chunk=chunk, capacity=capacity
    ).cache
    if exact == cache.specs:
        cache = text
    else:
        begin(cache, text)
    cache.freeze()
    cache.repeat(len(prompts))
    return cache
