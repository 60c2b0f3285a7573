"""ModelCache: a cache built for the layers of a model, of any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvkeep.cache import Cache
from kvkeep.errors import SpecError
from kvkeep.host.specs import LayerKind, Specs, fitting_some, per_layer
from kvkeep.policy import Need
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec

if TYPE_CHECKING:
    from kvkeep.host.contract import Activation

DEFAULT_SPEC = "keep_all"


class ModelCache(Cache):
    """A cache with one layer for each layer of a model.

    Args:
        kinds: of the model's layers.
        spec: what to keep: for all layers, for each, or for each type of layer.
        capacity: slots of fixed storage whose spec names none.
        rotaries: returns each layer's rotary embedding; called where a policy needs it.

    Attributes:
        specs: each layer's spec.
        activation: of the activated adapter that computed part of what the cache holds, if any.

    Raises:
        SpecError: a spec that does not exist or does not fit the model.
    """

    activation: Activation | None

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        spec: Specs = DEFAULT_SPEC,
        *,
        capacity: int | None = None,
        rotaries: Callable[[], Sequence[Rotary | None]],
    ) -> None:
        self.specs: list[CacheSpec] = per_layer(spec, kinds)
        needed = any(Need.ROTARY in one.policy.needs for one in self.specs)
        rotary = rotaries() if needed else [None] * len(kinds)
        layers = []
        for index, (one, kind) in enumerate(zip(self.specs, kinds, strict=True)):
            try:
                layers.append(
                    one.layer(
                        window=kind.window,
                        capacity=capacity,
                        rotary=rotary[index],
                        index=index,
                        count=len(kinds),
                    )
                )
            except SpecError as error:
                if isinstance(spec, str | CacheSpec):
                    raise fitting_some(one, kinds, error) from error
                raise
        super().__init__(layers)
        self.activation = None

    def token_limit(self, layer: int | None = None) -> int | None:
        """Most tokens that fit, into one layer or all; None where there is no limit."""
        layers = self.layers if layer is None else self.layers[layer : layer + 1]
        limits = [x.limit for x in layers if x.limit is not None and x.policy.budget is None]
        return min(limits, default=None)

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.activation = None
