"""The contract of a kind of models: what is special about them, and what follows for their caches.

A model may be of several kinds. The cache, `attach` and what is built on them ask the kinds, and
know none of them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.features import Lacks
from kvkeep.host import LayerKind
from kvkeep.layer.recurrent import RecurrentStates, StateSpec
from kvkeep.spec import CacheSpec


class Handle(Protocol):
    """A change of a model."""

    def remove(self) -> None:
        """Undo it."""


class Replaced:
    """A function of a module that is set in place of its own. There may have been another one, as
    accelerate gives modules, which moves weights to the device first."""

    def __init__(self, module: nn.Module, place: str, function: Any) -> None:
        self._module, self._place, self._before = module, place, vars(module).get(place)
        module.__dict__[place] = function

    def remove(self) -> None:
        """Undo it."""
        self._module.__dict__.pop(self._place, None)
        if self._before is not None:
            self._module.__dict__[self._place] = self._before


class Kind:
    """What models are like that are of no special kind; other kinds override what differs.

    Attributes:
        lacks: the features that models of this kind lack.
        placeless: whether a forward uses no positions but those of slots, and so is given none.
        own: why models of this kind compute attention themselves, as a clause; empty: they do not.
        narrows: whether later layers compute those tokens only whose logits are asked for.
        attends: whether some layer attends.
        returns_cache: whether a forward's output has the cache, by which transformers takes drafts
            back.
    """

    lacks: ClassVar[Lacks] = {}
    placeless: ClassVar[bool] = False
    own: ClassVar[str] = ""
    narrows: ClassVar[bool] = False
    attends: ClassVar[bool] = True
    returns_cache: ClassVar[bool] = True

    # -- what a model is like, by the config of its decoder ---------------------------------

    def has(self, text: PreTrainedConfig) -> bool:
        """Whether a model is of this kind."""
        return False

    def types(self, text: PreTrainedConfig) -> Mapping[str, LayerKind | None]:
        """The types of layers that this kind adds, as `layer_types` of a config names them, and how
        such a layer attends; None: it does not."""
        return {}

    def arranged(
        self, text: PreTrainedConfig, names: Sequence[str], layers: Sequence[LayerKind | None]
    ) -> Sequence[LayerKind | None]:
        """The attention of the layers of a model of this kind, where they depend on each other.

        Args:
            names: each layer's type.
            layers: how each would attend by itself.
        """
        return layers

    def reads(self, text: PreTrainedConfig) -> Mapping[int, int]:
        """The places of layers that read the slots of an earlier layer, with its place."""
        return {}

    # -- its cache --------------------------------------------------------------------------

    def require_specs(self, specs: Sequence[CacheSpec]) -> None:
        """Raise SpecError if a spec does not fit the kind."""

    def states(self, text: PreTrainedConfig) -> RecurrentStates | None:
        """The states of layers that do not attend, for a new cache; None: there are none."""
        return None

    def state_specs(self, model: PreTrainedModel) -> dict[str, StateSpec]:
        """What these states are like; see `Host.recurrent_specs`."""
        return {}

    def to_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of slots, (B, H, n, D) each, of what a model gives its cache."""
        return k, v

    def from_slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `to_slots`."""
        return k, v

    # -- an attached model ------------------------------------------------------------------

    def attach(self, model: PreTrainedModel) -> Sequence[Handle]:
        """Change a model that is going to be attached; returns what `detach` removes."""
        return ()

    def begin(self, cache: Any, decoder: PreTrainedModel, given: dict[str, Any]) -> None:
        """Called before a forward of an attached decoder, with its arguments, which may change."""

    def place(self, given: dict[str, Any], tokens: Tensor, fed: int) -> None:
        """Add the positions of a forward's tokens, (B, n), after `fed` columns, to its arguments,
        if the model would count them in another way."""

    def handing(
        self, given: dict[str, Any], shared: tuple[Tensor, Tensor] | None
    ) -> dict[str, Any]:
        """The keyword arguments of a layer that is run by itself.

        Args:
            given: those that the model gives it.
            shared: the keys and values, (B, H, n, D) each, of the layer that it reads; None: it
                reads no other layer, or does not run yet.
        """
        return given

    def begin_in_graph(self, cache: Any, given: dict[str, Any]) -> None:
        """Called in place of `begin` where the forward is traced. What depends on the cache is
        taken from its tickets."""

    def unpackable(self, changes: Sequence[Handle]) -> str:
        """Why a packed forward cannot compute an attached model, as a clause about it; empty if it
        can.

        Args:
            changes: those of `attach`.
        """
        return ""

    def end(self, cache: Any) -> None:
        """Called after the forward."""
