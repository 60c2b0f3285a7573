"""Check, before anything is fed, that a cache's policies support what a call will need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.features import Feature
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach


@dataclass(frozen=True)
class Demands:
    """What a call of `generate()` needs of its cache: that drafted tokens can be cropped
    (`drafts`), and attention weights over all tokens (`weights`) up to `columns` columns. `routed`:
    kvkeep computes the attention."""

    drafts: bool
    weights: bool
    columns: int
    routed: bool

    def require(self, cache: Cache) -> None:
        """Raise UnsupportedError if the cache cannot meet the demands."""
        if self.drafts:
            require_recordable(cache, routed=self.routed)
        if self.weights:
            require_whole(cache.layers, self.columns - cache.fed)


def require_recordable(cache: Cache, *, routed: bool) -> None:
    """Raise UnsupportedError if layers cannot decide about drafts as they would without drafts."""
    for layer in cache.layers:
        layer.require_recordable()
        if layer.by_token and (reason := cache.why_not(Feature.DRAFTED)):
            raise UnsupportedError(
                f"the model {reason}, such as {layer.policy.name}; use keep_all or a window, or "
                "generate without assistant_model and prompt_lookup_num_tokens"
            )
        if layer.by_token and not routed:
            raise UnsupportedError(
                f"rejected draft tokens must be cropped, and policy {layer.policy.name} decides "
                "after each token, which the model's own attention cannot; call "
                "kvkeep.attach(model), generate without assistant_model and "
                "prompt_lookup_num_tokens, or use keep_all or a window of so many tokens"
            )


def require_whole(layers: Iterable[LayerCache], tokens: int = 1) -> None:
    """Raise UnsupportedError if layers cannot return the attention weights of every token while
    `tokens` more are fed one by one: because they have evicted some, or will before the last.

    A layer with a sliding window of its own holds all tokens that its queries may see, as in
    transformers' own cache.
    """
    for index, layer in enumerate(layers):
        policy, held, fed = layer.policy, layer.length, layer.fed
        if layer.window is not None and policy.reach == Reach(layer.window):
            continue
        before = fed + tokens - 1
        budget = policy.at(before).budget
        if held != fed or (policy.ragged and layer.moved):
            why = f"layer {index} holds {held} slots for the {fed} tokens that were fed"
        elif budget is not None and before > budget:
            why = f"layer {index} will have dropped some of {before} tokens: it keeps {budget}"
        elif policy.step is not None:
            why = f"layer {index} may divide a chunk into steps of {policy.step} over other slots"
        else:
            continue
        raise UnsupportedError(
            f"output_attentions asks for the weights of all tokens, but {why} (policy "
            f"{policy.name}); use a keep_all cache for them, or leave output_attentions out"
        )
