"""ModelCache: a cache built for the layers of a model, of any model library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvkeep.cache import Cache, share_buffers, turns
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.geometry import Geometry
from kvkeep.host.specs import LayerKind, Specs, fitting_some, per_layer
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import RecurrentStates
from kvkeep.layer.stats import promised_bytes
from kvkeep.policy import Need
from kvkeep.renamed import Renamed
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec

DEFAULT_SPEC = "keep_all"


class Activation(NamedTuple):
    """The position from which an activated adapter computes, and the adapter's 128-bit hash in
    hexadecimal."""

    start: int
    adapter: str


class ModelCache(Cache):
    """A cache with one layer for each attention layer of a model.

    Args:
        kinds: the type and window of each of these layers.
        spec: one spec for all layers, for each layer, or for each type of layer.
        capacity: slots of fixed storage whose spec gives no number.
        rotaries: returns each layer's rotary embedding; called only if a policy needs it.
        identity: identifies the model's weights, as `kvkeep.host.fingerprint.sampled` does; called
            only if a policy was calibrated for a model. None: the model is not known.
        carried: the states of the recurrent layers; None if the model has none.

    Attributes:
        specs: each layer's spec.
        places: each layer's index among all layers of the model, including layers without
            attention.
        activation: start of the activated adapter that computed some of the held tokens; None
            without an activated adapter.

    Raises:
        SpecError: a spec does not exist or does not fit the model.
    """

    activation: Activation | None = None
    bytes_of = Renamed("kvkeep.host.cache.bytes_of")
    token_limit = Renamed("kvkeep.host.cache.token_limit")

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        spec: Specs = DEFAULT_SPEC,
        *,
        capacity: int | None = None,
        rotaries: Callable[[], Sequence[Rotary | None]],
        identity: Callable[[], str] | None = None,
        carried: RecurrentStates | None = None,
    ) -> None:
        self.specs: list[CacheSpec] = per_layer(spec, kinds)
        self.places = [
            index if kind.place is None else kind.place for index, kind in enumerate(kinds)
        ]
        _require_calibrated(self.specs, identity)
        rotary = needed_rotaries(self.specs, rotaries)
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
                        readers=kind.readers,
                        slopes=kind.slopes,
                        latent=kind.latent,
                    )
                )
            except SpecError as error:
                if isinstance(spec, str | CacheSpec):
                    raise fitting_some(one, kinds, error) from error
                raise
        Cache.__init__(self, layers, carried)

    @property
    def alone(self) -> bool:
        """Whether its tokens cannot be fed in one forward with tokens of other caches."""
        return self.activation is not None

    def why_not_moved(self, tokens: int, start: int) -> str:
        """Why the tokens of a text that was computed from position 0 on cannot be moved to begin at
        position `start`, as a clause about the model; empty if they can, or for reasons that do not
        depend on the positions."""
        return ""

    def begin(self, columns: int) -> None:
        """Check that a forward of `columns` columns can begin."""
        self.admit(columns)

    def record_drafts(self, on: bool) -> None:
        """Begin or end the recording of drafts: see `LayerCache.record_past`. When recording ends,
        all tokens become certain."""
        for layer in self.layers:
            recorded, layer.record_past = layer.record_past, on
            if recorded and not on:
                layer.settle()

    def replace_layers(self, layers: Sequence[LayerCache], specs: Sequence[CacheSpec]) -> None:
        """Replace all layers; `specs` are the new layers' specs."""
        with turns(self.layers):
            self.layers, self.specs = list(layers), list(specs)
            share_buffers(self.layers)

    def reset(self) -> None:
        """Forget every token."""
        Cache.reset(self)
        self.activation = None


def token_limit(cache: ModelCache, layer: int | None = None) -> int | None:
    """Most tokens that fit into one layer, or into every layer; None: no limit."""
    layers = cache.layers if layer is None else cache.layers[layer : layer + 1]
    limits = [x.slots.limit for x in layers if x.policy.budget is None]
    return min((limit for limit in limits if limit is not None), default=None)


def bytes_of(cache: ModelCache, geometries: Sequence[Geometry], tokens: int, rows: int = 1) -> int:
    """The value of `live_bytes` of a cache after `tokens` columns were fed.

    Args:
        geometries: each layer's geometry; their `rows` is not used.
    """
    return sum(
        promised_bytes(
            layer.policy,
            layer.key_codec,
            layer.value_codec,
            tokens,
            geometry._replace(rows=rows),
            late=layer.slots.late,
        )
        for layer, geometry in zip(cache.layers, geometries, strict=True)
    )


def _require_calibrated(specs: Sequence[CacheSpec], identity: Callable[[], str] | None) -> None:
    """Raise SpecError if a policy was calibrated for another model."""
    for one in dict.fromkeys(specs):
        made_for = one.policy.calibrated_for
        if made_for is None:
            continue
        if identity is None:
            raise SpecError(
                f"{one} was calibrated for one model, and a config does not tell which one this "
                "is; build the cache from the model"
            )
        if identity() != made_for:
            raise SpecError(
                f"{one} was calibrated for another model, or for other weights of this one; "
                "calibrate this model with kvkeep calibrate"
            )


def needed_rotaries(
    specs: Sequence[CacheSpec], rotaries: Callable[[], Sequence[Rotary | None]]
) -> Sequence[Rotary | None]:
    """Each layer's rotary embedding, if a policy or a codec uses it. A codec works without an
    unknown rotary embedding: its centres are then not rotated, and codes are less precise."""
    none = [None] * len(specs)
    if any(Need.ROTARY in one.policy.needs for one in specs):
        return rotaries()
    if not any(one.key_codec.centre for one in specs):
        return none
    try:
        return rotaries()
    except UnsupportedError:
        return none
