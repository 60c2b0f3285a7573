"""The contract of a kind of models: how they differ from a plain decoder, and how their caches do.

A model may be of several kinds. The cache, `attach` and all other code call the methods of kinds,
and never test for a certain kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.features import Lacks
from kvkeep.geometry import Geometry
from kvkeep.host import LayerKind
from kvkeep.layer.recurrent import RecurrentStates, StateSpec
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec


class Handle(Protocol):
    """A change of a model."""

    def remove(self) -> None:
        """Undo the change."""


class Replaced:
    """The replacement of a module's function. The module may already have a replacement, such as
    accelerate's forward, which moves weights to the device first; `remove` restores it."""

    def __init__(self, module: nn.Module, place: str, function: Any) -> None:
        self._module, self._place, self._before = module, place, vars(module).get(place)
        module.__dict__[place] = function

    def remove(self) -> None:
        """Undo the replacement."""
        self._module.__dict__.pop(self._place, None)
        if self._before is not None:
            self._module.__dict__[self._place] = self._before


class Kind:
    """A kind of models. The defaults describe a plain decoder; subclasses override what differs.

    Attributes:
        lacks: the features that models of this kind lack.
        placeless: whether a forward takes no positions, because only slots' positions are used.
        own: why models of this kind compute attention themselves, as a clause; empty: they do not.
        narrows: whether later layers compute only the tokens whose logits are requested.
        attends: whether any layer attends.
        returns_cache: whether a forward's output contains the cache, which transformers needs to
            remove drafts.
    """

    lacks: ClassVar[Lacks] = {}
    placeless: ClassVar[bool] = False
    own: ClassVar[str] = ""
    narrows: ClassVar[bool] = False
    attends: ClassVar[bool] = True
    returns_cache: ClassVar[bool] = True

    # -- properties of a model, by its decoder's config -------------------------------------

    def has(self, text: PreTrainedConfig) -> bool:
        """Whether a model is of this kind."""
        return False

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        """The types of layers that this kind adds, as named in `layer_types` of a config, and the
        `LayerKind` of a layer of this type; None: it does not attend."""
        return {}

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """The attention of the layers of a model of this kind, where they depend on each other.

        Args:
            names: each layer's type.
            layers: each layer's `LayerKind` by its type alone.
        """
        return layers

    def reads(self, text: PreTrainedConfig) -> Mapping[int, int]:
        """For layers that read the slots of an earlier layer: the index of the layer -> the index
        of the earlier layer."""
        return {}

    # -- caches -----------------------------------------------------------------------------

    def require_specs(self, specs: Sequence[CacheSpec]) -> None:
        """Raise SpecError if a spec does not fit the kind."""

    def states(self, text: PreTrainedConfig) -> RecurrentStates | None:
        """The recurrent states for a new cache; None: the model has none."""
        return None

    def why_not_moved(self, text: PreTrainedConfig, tokens: int, start: int) -> str:
        """See `ModelCache.why_not_moved`."""
        return ""

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """The specs of the recurrent states; see `Host.recurrent_specs`."""
        return {}

    def to_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the keys and values that a model passes to its cache into the keys and values of
        slots, (B, H, n, D) each."""
        return k, v

    def from_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `to_slots`."""
        return k, v

    def geometry(self, own: Geometry) -> Geometry:
        """The geometry of slots, given that of the keys and values that the model passes to its
        cache."""
        return own

    def in_slots(self, rotary: Rotary) -> Rotary:
        """The rotary embedding of slots' keys, given that of the model's keys."""
        return rotary

    def behind(self, layer: Any) -> Tensor | None:
        """What slots hold behind the keys that a layer of a transformers cache holds, (B, 1, n, D);
        None: nothing."""
        return None

    # -- an attached model ------------------------------------------------------------------

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Change a model that will be attached; returns the changes, which `detach` removes."""
        return ()

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Called before a forward of an attached decoder, with its arguments `given`, which may be
        changed."""

    def place(self, given: dict[str, Any], tokens: Tensor, fed: int) -> None:
        """Add the positions of a forward's tokens, (B, n), after `fed` columns, to its arguments,
        if the model would count them in another way."""

    def handing(
        self, given: dict[str, Any], shared: tuple[Tensor, Tensor] | None
    ) -> dict[str, Any]:
        """The keyword arguments of a layer that runs by itself.

        Args:
            given: those that the model gives it.
            shared: the keys and values, (B, H, n, D) each, of the layer that it reads; None: it
                reads no other layer, or does not run yet.
        """
        return given

    def begin_in_graph(self, cache: Any, given: dict[str, Any]) -> None:
        """Called instead of `begin` if the forward is traced. Values that depend on the cache must
        come from its tickets."""

    def unpackable(self, changes: Sequence[Handle]) -> str:
        """Why packed forwards do not support an attached model, as a clause about the model; empty
        if they do.

        Args:
            changes: the changes that `attach` has made.
        """
        return ""

    def end(self, cache: Any) -> None:
        """Called after a forward."""
