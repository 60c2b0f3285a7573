"""Forwards of transformers models whose attention layers of kvkeep compute, one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import ATTACHMENT, changing_ropes, decoder_config, decoder_of, is_routed
from kvkeep.hf.handover import Handed
from kvkeep.hf.inputs import check_fed
from kvkeep.hf.kinds import KeepsStates, kinds_of
from kvkeep.hf.kinds.multimodal import require_counted, why_not_counted
from kvkeep.hf.layers_cache import LayersCache
from kvkeep.hf.model_layers import TellsLayers
from kvkeep.hf.placing import Placed, takes_positions
from kvkeep.host import ModelCache
from kvkeep.host.packed import Packed
from kvkeep.layer.recurrent import NoStates


def unpackable(model: PreTrainedModel) -> str:
    """Why a forward of the model cannot compute tokens of several sequences; empty if it can."""
    text = decoder_config(model.config)
    changing = next(iter(changing_ropes(model.config)), "")
    if changing:
        return (
            f"the frequencies of its rotary embedding ({changing}) follow the longest text of a "
            "forward"
        )
    if not is_routed(text):
        attachment = getattr(model, ATTACHMENT, None)
        if attachment is None:
            return "kvkeep does not compute its attention; call kvkeep.attach(model)"
        return f"it computes attention itself, because {attachment.own}"
    changes = getattr(decoder_of(model), ATTACHMENT).changes
    takes = takes_positions(model) or any(isinstance(x, Placed) for x in changes)
    if not takes and not any(kind.placeless for kind in kinds_of(model)):
        return "its forward takes no positions"
    for kind in kinds_of(model):
        if reason := kind.unpackable(changes):
            return f"it {reason}"
    return why_not_counted(model)


def require_packable(model: PreTrainedModel, caches: Sequence[ModelCache]) -> None:
    """Raise UnsupportedError, or StateError for a cache that is not the model's, unless
    `PackedCache` can serve a forward of these sequences."""
    reason = unpackable(model)
    if reason:
        raise UnsupportedError(
            f"{type(model).__name__} cannot compute several sequences in one forward: {reason}; "
            "feed them one by one, or to a kvkeep.generate.Batch, which does so"
        )
    for cache in caches:
        if not isinstance(cache, Cache):
            raise StateError(
                f"a packed forward through a {type(cache).__name__}; build each sequence's cache "
                "as kvkeep.Cache(model)"
            )
        require_counted(model, cache, "packed forwards")
        if cache.activation is not None:
            raise UnsupportedError(
                "a packed forward cannot start an activated adapter at a token of each sequence; "
                "feed the sequences of the adapter one by one"
            )


def check_packed(model: PreTrainedModel, sequences: Sequence[tuple[Tensor, ModelCache]]) -> None:
    """Check each sequence's next token ids, (n,), as a forward of its own would.

    Raises:
        ShapeError: an id is outside the vocabulary.
    """
    for ids, cache in sequences:
        check_fed(model, {"input_ids": ids[None]}, cache.fed)


class LaidCache(LayersCache):
    """What a model takes as `cache` in a forward of one row, which attends to layers that are
    laid before it."""

    _handed: Handed | None = None

    @property
    def handed(self) -> Handed | None:
        """The tag of the last keys given."""
        return self._handed

    def tag(self, keys: Tensor, values: Tensor, place: int) -> Handed:
        """Tag new keys and values (1, H, n, D) with their layer."""
        if len(keys) != 1:
            raise ShapeError(
                f"a packed forward has one row, but layer {place} is given {len(keys)}"
            )
        self.require_attended()
        self._handed = super().tag(keys, values, place)
        return self._handed

    def require_attended(self) -> None:
        """Raise UnsupportedError if the last keys that `update` returned did not reach the
        attention function."""
        if self._handed is not None and not self._handed.taken:
            raise UnsupportedError(
                "the model attends to other keys than those it gave to the cache, so its sequences "
                "cannot be packed; feed them one by one"
            )


class PackedCache(KeepsStates, TellsLayers, LaidCache):
    """What a model takes as `cache` in a packed forward.

    Args:
        tokens: the tokens of all sequences, and their layers and states.
        cache: that of any sequence.
    """

    def __init__(self, tokens: Packed, cache: Cache) -> None:
        super().__init__(tokens.layers)
        self.carried, self.packed_states = NoStates(), tokens.states
        self.model_layers = cache.model_layers

    def index(self, place: int) -> int:
        return self.model_layers.indices.get(place, 0)
