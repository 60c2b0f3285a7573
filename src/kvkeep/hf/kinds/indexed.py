"""Attention to tokens that an index chooses for each query: DeepSeek V3.2, GLM-5 and others.

The index's key for a token lies in the token's slot, behind the key that attention reads. The
model's own indexer scores these keys and chooses tokens. Its choice is passed on as positions,
which identify the same tokens in every layer, whatever the order of slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.errors import SpecError
from kvkeep.features import Feature, Lacks, unsupported
from kvkeep.hf.cache_argument import cache_in
from kvkeep.hf.handover import Handed, IndexPart
from kvkeep.hf.kinds.base import Handle, Kind, Replaced
from kvkeep.host import LayerKind
from kvkeep.layer.sight import Sighted
from kvkeep.spec import CacheSpec

_INDEXED = ("indexed_attention", "minimax_m3_sparse")
_WIDTHS = ("index_head_dim", "indexer_head_dim")
"""The names of the width of an index's keys."""
_HAS = "has layers whose tokens an index chooses"
_CHOICE = "prev_topk_indices"
"""The argument by which a layer hands its choice to layers that share it."""


NOT_CHOSEN = (
    Feature.COMPILED,
    Feature.GRAPHED,
    Feature.EXPORTED,
    Feature.DRAFTED,
    Feature.REREAD,
    Feature.NARROWED,
    Feature.PAIRS,
)
"""The features that models lack if the tokens that a query sees are chosen."""


class Indexed(Kind):
    """Models with layers that attend to the tokens that an index chooses."""

    lacks: ClassVar[Lacks] = {
        **unsupported(_HAS, *NOT_CHOSEN),
        Feature.UNATTACHED: f"{_HAS} by separate keys",
    }

    def require_specs(self, specs: Sequence[CacheSpec]) -> None:
        """Raise SpecError if a policy divides chunks: the tokens of a chunk are chosen at once."""
        for spec in dict.fromkeys(specs):
            if spec.policy.step is not None:
                raise SpecError(
                    f"{spec} evicts within a chunk, but the model chooses the tokens of a chunk at "
                    "once; leave out step, and feed smaller chunks (prefill_chunk)"
                )

    def has(self, text: PreTrainedConfig) -> bool:
        return not set(_INDEXED).isdisjoint(getattr(text, "layer_types", None) or ())

    def types(self, text: PreTrainedConfig) -> dict[str, LayerKind | None]:
        return {name: LayerKind(name, None) for name in _INDEXED}

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """Layers that choose have the index's keys; others share their choice."""
        chooses = getattr(text, "indexer_types", None) or ["full"] * len(names)
        width = next(int(x) for name in _WIDTHS if (x := getattr(text, name, None)))
        return [
            replace(one, beside=width)
            if one is not None and name in _INDEXED and how == "full"
            else one
            for one, name, how in zip(layers, names, chooses, strict=True)
        ]

    def behind(self, layer: Any) -> Tensor | None:
        keys: Tensor | None = getattr(layer, "indexer_keys", None)
        return getattr(layer, "idx_keys", None) if keys is None else keys[:, None]

    def handing(
        self, given: dict[str, Any], shared: tuple[Tensor, Tensor] | None
    ) -> dict[str, Any]:
        return given | {_CHOICE: None} if _CHOICE in given else given  # each layer chooses itself


class SharesChoice(Kind):
    """Models with layers that attend to the tokens that an earlier layer has chosen."""

    lacks: ClassVar[Lacks] = unsupported(
        "has layers that share the tokens which an index chooses", Feature.TRAINED
    )

    def has(self, text: PreTrainedConfig) -> bool:
        return "shared" in (getattr(text, "indexer_types", None) or ())


def choosing(module: nn.Module) -> Handle | None:
    """Let an indexer choose among the tokens of a kvkeep cache; None: the module is no indexer."""
    if not (type(module).__name__.endswith("Indexer") and hasattr(module, "index_topk")):
        return None
    return Replaced(module, "forward", partial(_chosen, module.forward))


def _chosen(own: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The choice of an indexer, int32 (B, n, c): positions for a kvkeep cache, columns for any
    other cache."""
    given = inspect.signature(own).bind(*args, **kwargs).arguments
    cache = cache_in(given)
    handed: Handed | None = getattr(cache, "handed", None)
    if handed is None or handed.absorbed is None:
        return own(*args, **kwargs)  # type: ignore[no-any-return]
    sighted: Sighted = handed.layer.sighted(given["attention_mask"][:, 0])
    index = _Index(handed, sighted.keys)
    given |= {"attention_mask": sighted.visible[:, 0], "cache": index}
    columns = own(**given)
    position = sighted.position.to(torch.int32)
    return position.expand(*columns.shape[:2], -1).gather(2, columns.long())


class _Index(NamedTuple):
    """The cache argument of an indexer. `handed`: the tag of the layer's new keys; `past`: keys of
    earlier slots, (1|B, 1, S, D)."""

    handed: Handed
    past: Tensor | None

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        """Record new keys of the index, (B, n, D), and return the keys of all tokens."""
        self.handed.indexed = IndexPart(keys[:, None])
        width = keys.shape[-1]
        return keys if self.past is None else torch.cat([self.past[:, 0, :, -width:], keys], dim=1)
