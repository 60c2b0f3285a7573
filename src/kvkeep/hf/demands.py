"""What may be asked of a cache that its policies cannot do, refused before anything is fed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.cache import Cache
from kvkeep.errors import UnsupportedError
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import Reach
from kvkeep.policy import POLICIES


@dataclass(frozen=True)
class Demands:
    """What a call of `generate()` asks of its cache: that drafts can be taken back, and attention
    weights over all tokens until the last of so many `columns`."""

    drafts: bool
    weights: bool
    columns: int

    def require(self, cache: Cache) -> None:
        """Raise UnsupportedError for what the cache will not be able to do."""
        if self.drafts:
            require_croppable(cache.layers)
        if self.weights:
            require_whole(cache.layers, self.columns - cache.fed)


def require_croppable(layers: Iterable[LayerCache]) -> None:
    """Raise UnsupportedError where a policy cannot take tokens back, whatever is recorded."""
    for layer in layers:
        if not layer.policy.rollback:
            able = [name for name, policy in POLICIES.items() if policy.rollback]
            raise UnsupportedError(
                f"drafted tokens that are rejected must be taken back, which policy "
                f"{layer.policy.name} cannot do, for it learns from every token; generate "
                "without assistant_model and prompt_lookup_num_tokens, or with one of "
                f"{', '.join(able)}"
            )


def require_whole(layers: Iterable[LayerCache], tokens: int = 1) -> None:
    """Raise UnsupportedError where layers cannot give the attention weights of every token, as long
    as `tokens` more are fed one by one: where they dropped some already, or will before the last.

    A layer with a sliding window of its own holds all that its queries may see, as it does in
    transformers' own cache.
    """
    for index, layer in enumerate(layers):
        policy, held, fed = layer.policy, layer.length, layer.fed
        if layer.window is not None and policy.reach == Reach(layer.window):
            continue
        before, budget = fed + tokens - 1, policy.budget
        if held != fed or (policy.ragged and layer.moved):
            why = f"layer {index} holds {held} slots for the {fed} tokens that were fed"
        elif budget is not None and before > budget:
            why = f"layer {index} will have dropped some of {before} tokens: it keeps {budget}"
        else:
            continue
        raise UnsupportedError(
            f"output_attentions asks for the weights of all tokens, but {why} (policy "
            f"{policy.name}); use a keep_all cache for them, or leave output_attentions out"
        )
