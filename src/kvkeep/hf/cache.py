"""Cache: kvkeep's cache with transformers' interface."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from threading import get_ident
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep import cache as core
from kvkeep.arguments import suggests
from kvkeep.errors import SpecError, StateError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.graph.custom_ops import Ticket, Traced, with_readings
from kvkeep.hf.config import ATTACHMENT, base_config, decoder_config, is_routed
from kvkeep.hf.demands import require_fitting_mask
from kvkeep.hf.handover import Handed, hand_over, taggable
from kvkeep.hf.interface.like_dynamic import LikeDynamic
from kvkeep.hf.interface.model_layers import ModelLayers
from kvkeep.hf.interface.transformers_names import TransformersNames
from kvkeep.hf.kinds import (
    Forwards,
    KeepsStates,
    from_slots,
    kinds_of,
    layer_geometries,
    layer_kinds,
    require,
    to_slots,
    why_not,
)
from kvkeep.hf.kinds.multimodal import media_told, shares_positions
from kvkeep.hf.parallel import head_processes, is_parallel
from kvkeep.hf.rotary import require_same_frequencies, rotaries_of
from kvkeep.host import ModelCache, Specs, host_of, per_layer, saving
from kvkeep.host.cache import DEFAULT_SPEC, bytes_of
from kvkeep.host.compress import compress
from kvkeep.host.fingerprint import sampled
from kvkeep.layer.cursor import Turn
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import StateSpec
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec


class Cache(  # type: ignore[misc]
    LikeDynamic, TransformersNames, KeepsStates, transformers.Cache
):
    """A kvkeep cache for a transformers model: pass it as `cache`.

    With an attached model (`kvkeep.attach`), attention reads the slots in place, for every spec.
    With an unattached model, `update` returns all keys and values, which is correct only if the
    model's own mask agrees with the spec; otherwise it raises.

    Args:
        model: the model, or its config.
        spec: what to keep, e.g. "keep_all", "window:1024,sinks=4@fixed"; a list gives one spec
            per layer, a mapping one per layer type ("full_attention", "sliding_attention"). A
            layer with a sliding window of its own never keeps more than that window.
        capacity: slots of fixed storage whose spec gives no number; None: the model's context.

    Raises:
        SpecError: the spec does not exist or does not fit the model.
        UnsupportedError: a layer of the model caches something other than keys and values or a
            recurrent state.
    """

    handed: Handed | None = None  # the tag of the last keys given to this cache
    _start = 0  # columns fed before the current forward
    awaited: int | None = None  # columns fed after it, if kvkeep's hooks have begun it
    _first_states: Mapping[str, StateSpec] | None = None  # of an empty cache, from a forward
    weights = False  # whether the current forward returns attention weights

    @suggests()
    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        spec: Specs = DEFAULT_SPEC,
        *,
        capacity: int | None = None,
    ) -> None:
        config = base_config(model)
        self.config = decoder_config(config)
        self._around = self.config is not config  # a model that contains the decoder may use images
        self._kinds = layer_kinds(config)
        self.kinds = kinds_of(config)
        self._model = None if isinstance(model, PreTrainedConfig) else weakref.ref(model)
        if capacity is None:
            capacity = getattr(self.config, "max_position_embeddings", None)
        specs = per_layer(spec, self._kinds)
        for kind in self.kinds:
            kind.require_specs(specs)
        ModelCache.__init__(
            self,
            self._kinds,
            spec,
            capacity=capacity,
            rotaries=partial(_rotaries, model),
            identity=None if isinstance(model, PreTrainedConfig) else partial(_identity, model),
            carried=next(filter(None, (kind.states(self.config) for kind in self.kinds)), None),
        )
        self.model_layers = ModelLayers.of(self._kinds, self.carried.places, len(self))
        self.fed_since = Forwards()
        policies = [layer.policy for layer in self.layers]
        kept = set(zip(self._kinds, policies, strict=True))
        self._alike = len(kept) == len(set(self._kinds))
        self._issue_tickets()

    def __repr__(self) -> str:
        specs = " ".join(dict.fromkeys(map(str, self.specs)))
        return f"kvkeep.Cache({specs!r}, layers={len(self.layers)}, seen={self.seen.tolist()})"

    def follow(self, config: PreTrainedConfig) -> None:
        """Use the config of a forward's model, if it is another view of this cache's config: the
        model may have been attached after the cache was built."""
        if config is not self.config and config.__dict__ is self.config.__dict__:
            self.config = config

    # -- the forward ------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by a model with new keys and values (B, H, n, D), after its rotary embedding.

        Attached: returns them, tagged with their layer, for kvkeep's attention function.
        Unattached: stores them and returns all keys and values in the order of their positions, as
        the model's own mask expects.
        """
        place, found = layer_idx, self.model_layers.indices.get(layer_idx)
        if found is None:
            raise StateError(
                f"layer {place} of a model feeds a cache built for {len(self.layers)} layers; "
                "build it as kvkeep.Cache(model)"
            )
        layer_idx = found
        layers = self._layers if not self.lent else self.layers
        layer, traced = layers[layer_idx], self._traced[layer_idx]
        if torch.compiler.is_compiling():
            self._require_routed()
            require(self.config, Feature.COMPILED, "call the model uncompiled")
            key_states, value_states = taggable(key_states, value_states)
            hand_over(key_states, value_states, layer, traced)
            return key_states, value_states
        if layer_idx == 0:
            self._require_turn()
        if self.handed is not None and not self.handed.taken:
            raise StateError(
                "the last keys given to this cache were never attended to: the model is not the "
                "attached one it was built for, a forward was interrupted, or the keys were "
                "computed elsewhere; reset() the cache, and build it as kvkeep.Cache(model), or as "
                "kvkeep.Cache.from_dynamic(model, cache) of keys computed elsewhere"
            )
        if layer_idx == 0 or self.routed is None:
            self.begin(key_states.shape[2], key_states)
        if layer.cursor.history.columns != self._start:
            raise UnsupportedError(
                f"layer {place} is given keys more than once in a forward; use transformers' "
                "own cache for this model"
            )
        if self.routed:
            self.handed = hand_over(key_states, value_states, layer, traced)
            self.handed.weights = self.weights
            return key_states, value_states
        spec = self.specs[layer_idx]
        own = hasattr(self._model and self._model(), ATTACHMENT)
        remedy = "use keep_all" if own else "call kvkeep.attach(model) first"
        require(self.config, Feature.UNATTACHED, remedy)
        require_fitting_mask(layer, spec, key_states, alike=self._alike, remedy=remedy)
        view = layer.extend(*to_slots(self.kinds, key_states, value_states))
        held = layer.contents.in_order(view)
        layer.settle()
        if self._around and media_told() is not False:  # unattached, it is unknown
            layer.cursor.history.mark_embedded()
        return from_slots(self.kinds, held.keys, held.values)

    def _require_turn(self) -> None:
        """Raise StateError while another thread runs a forward."""
        if self._feeding is not None:
            thread, until = self._feeding
            if thread != get_ident() and any(x.fed < until or x.cursor.unread for x in self.layers):
                raise StateError(
                    "another thread's forward of this cache has not ended: a cache serves one "
                    "thread at a time; wait for it, or give each thread a fork. If it was "
                    "interrupted, rewind() or reset() the cache"
                )

    @property
    def offset(self) -> Tensor | None:
        """The model's next rotary position minus the tokens seen, int64 (B,); None: 0. See
        `kvkeep.hf.kinds.multimodal`."""
        return self._layers[0].cursor.history.offset if self._layers else None

    @property
    def alone(self) -> bool:
        return super().alone or self.offset is not None

    @property
    def compiles(self) -> bool:
        """Whether a step of one token a row may run in a compiled graph: the model is attached, the
        cache holds a prompt without padding, and the step needs nothing that graphs lack."""
        return (
            self.fed > 0
            and self.activation is None
            and self.offset is None
            and not (self.weights or self.written_out or self.lent)
            and self._compilable
            and not self.layers[0].padded
            and not (self.carried and self.layers[0].record_past)
            and is_routed(self.config)
        )

    @property
    def tickets(self) -> Sequence[Ticket]:
        """The arguments of a compiled graph: a ticket for each layer, then for each reading."""
        return cast(Sequence[Ticket], self._traced)

    def expect(self, columns: int) -> None:
        """Check that a forward of `columns` columns may begin, before any of it runs."""
        self._end_recording()
        with self._turn:
            self._require_turn()
            self.carried.require(self.fed)
            self.admit(columns)
            self._feeding = get_ident(), self.fed + columns

    def forget_unused(self) -> None:
        """Called before a forward of the attached model: forget keys to which the previous forward
        did not attend, because it was refused or interrupted. No layer holds them."""
        with self._turn:
            self._require_turn()
            self.handed = None

    def end_forward(self) -> None:
        """Called after a forward of the attached model.

        Raises:
            UnsupportedError: the last keys that `update` returned did not reach the attention
                function.
        """
        self.require_attended()
        for kind in self.kinds:
            kind.end(self)

    def begin(self, columns: int, *given: Tensor) -> None:
        """Check that a forward of `columns` columns may begin, before its first layer changes
        anything, and record its start. `given`: tensors that may require gradients."""
        with self._turn:
            self._require_turn()
            self._admit(columns, *given)
            self._feeding = get_ident(), self.fed + columns

    def _admit(self, columns: int, *given: Tensor) -> None:
        self._end_recording()
        self._uncropped = True
        if given:
            for layer in self.layers:
                layer.writer.check_gradients(*given)
        if self.kinds:
            self._require_running()
        routed = is_routed(self.config)
        if self.fed and self.routed not in (None, routed):
            raise StateError(
                "this cache was filled by the model "
                + ("before it was attached" if routed else "while it was attached")
                + "; reset() it, or continue with the model in that state"
            )
        self.admit(columns)
        self._start, self.routed = self.fed, routed

    def require_attended(self) -> None:
        """Raise UnsupportedError, at the end of a forward, if the last keys that `update` returned
        did not reach the attention function."""
        if self.handed is not None and not self.handed.taken:
            raise UnsupportedError(
                "the model's last layer gave keys to the cache but attended to other keys, so its "
                "output is wrong; reset() the cache, and use it with kvkeep.detach(model)"
            )
        for layer in self.layers:
            layer.cursor.require_read()

    def bytes_for(self, tokens: int, rows: int = 1, dtype: torch.dtype | None = None) -> int:
        """The value of `live_bytes` after `tokens` columns were fed.

        Args:
            dtype: dtype of keys and values; None: the dtype of keys fed so far, or the model's.

        Raises:
            UnsupportedError: the model's config does not give the width of its keys.
        """
        known = [layer.history.geometry for layer in self.layers]
        geometries = [one for one in known if one is not None]
        if len(geometries) < len(self.layers):  # the cache is empty
            model = None if self._model is None else self._model()
            geometries = layer_geometries(self.config, head_processes(model))
        if dtype is not None:
            geometries = [one._replace(dtype=dtype) for one in geometries]
        return bytes_of(self, geometries, tokens, rows) + rows * self._state_bytes

    @property
    def _state_bytes(self) -> int:
        """Bytes of one row's recurrent states."""
        model = None if self._model is None else self._model()
        if self.carried and not self.fed and self._first_states is None and model is not None:
            self._first_states = host_of(model).recurrent_specs()
        specs = self.carried.specs or self._first_states or {}
        return sum(spec.nbytes for spec in specs.values())

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: Tensor | None = None,
        notes: Mapping[str, str] | None = None,
        tokenizer: Any = None,
        model: PreTrainedModel | None = None,
        sync: bool = True,
        private: bool = False,
    ) -> None:
        """Write this cache to a file, for `kvkeep.load`; an existing file is replaced atomically.

        Args:
            tokens: the token ids that were fed, (B, columns), to store in the file.
            notes: texts to store in the file, by name.
            tokenizer: the tokenizer, to store its hashes, which `load` can compare.
            model: the model, if this cache was built from its config only.
            sync: fsync the file, so that it survives a loss of power.
            private: make a new file readable by its owner only.

        Raises:
            StateError: the cache is empty, its model is unknown, or a forward is running; or the
                model was not attached, and is one in which tokens of images share positions.
            SavedCacheError: the file cannot be written; an existing file is unchanged.
        """
        model = model or (None if self._model is None else self._model())
        if model is None:
            raise StateError(
                "the model of this cache is unknown, because it was built from a config or the "
                "model was deleted; give save(model=...)"
            )
        if self._around and self.routed is False and shares_positions(model):
            raise StateError(
                "the positions after an image are unknown in a cache that an unattached model "
                "filled; call kvkeep.attach(model) before you fill the cache"
            )
        saving.save(
            self,
            path,
            model,
            tokens=tokens,
            notes=notes,
            tokenizer=tokenizer,
            sync=sync,
            private=private,
        )

    def compress(self, model: PreTrainedModel, ids: Tensor, spec: Specs | None = None) -> None:
        """Evict all but a share of the slots, independently of later questions about the text; see
        `kvkeep.host.compress.compress`.

        Args:
            model: the model of this cache, attached.
            ids: the tokens that were fed, int64 (n,) or (1, n).
            spec: such as "kvzip:25%"; None: this cache's spec.
        """
        compress(host_of(model), self, ids, spec)

    def why_not(self, feature: Feature) -> str:
        """Why the model lacks a feature, as a clause about the model; empty if it does not."""
        return why_not(self.kinds, feature)

    def why_not_moved(self, tokens: int, start: int) -> str:
        reasons = (kind.why_not_moved(self.config, tokens, start) for kind in self.kinds)
        return next(filter(None, reasons), "")

    def _require_routed(self) -> None:
        if not is_routed(self.config):
            raise UnsupportedError(
                "a kvkeep cache in a compiled graph needs an attached model; call "
                "kvkeep.attach(model) first"
            )

    def __copy__(self) -> Cache:
        other = core.Cache.__copy__(self)
        other.fed_since = Forwards()
        other._issue_tickets()
        return other

    def _issue_tickets(self) -> None:
        """Create tickets for the current layers, and clear the state of a running forward."""
        for layer in self.layers:
            if layer.window is not None and layer.cursor.holes_after is None:
                layer.cursor.holes_after = 0
        self.handed = self._feeding = None
        self._turn = Turn()
        own = [Ticket(weakref.ref(layer), layer.cursor.readers) for layer in self.layers]
        self._traced: list[Traced] = [*with_readings(own)]
        self._compilable = not self.why_not(Feature.COMPILED)
        fixed = (
            all(layer.slots.storage.fixed_addresses for layer in self.layers) and not self.carried
        )
        self._fixed = fixed and self._compilable

    def replace_layers(self, layers: Sequence[LayerCache], specs: Sequence[CacheSpec]) -> None:
        """See `ModelCache.replace_layers`."""
        ModelCache.replace_layers(self, layers, specs)
        self._issue_tickets()

    def restore(self, snapshot: core.Snapshot) -> None:
        """See `kvkeep.cache.Cache.restore`."""
        core.Cache.restore(self, snapshot)
        self.handed = self._feeding = None

    def rewind(self, columns: int) -> None:
        """See `kvkeep.cache.Cache.rewind`."""
        core.Cache.rewind(self, columns)
        self.handed = self._feeding = None
        self._uncropped = False

    def reset(self) -> None:
        """Forget every token."""
        ModelCache.reset(self)
        self.handed = self._feeding = None
        self._turn, self.fed_since = Turn(), Forwards()
        self.end_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """A copy of the state for the same model; the config is shared."""
        memo[id(self.config)] = self.config
        _ = self.layers  # also if they are lent
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        copied._issue_tickets()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        left_out: dict[str, Any] = {
            "_model": None,
            "_traced": [],
            "handed": None,
            "fed_since": Forwards(),
        }
        _ = self.layers  # also if they are lent
        return self.__dict__ | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._issue_tickets()


def _rotaries(model: Any) -> list[Rotary | None]:
    """The rotary embedding of each layer. With a config only, the layers cannot be tried."""
    if isinstance(model, PreTrainedConfig):
        require_same_frequencies(model)
        if any(kind.latent for kind in layer_kinds(model)):
            raise UnsupportedError(
                "only a part of a latent rotates, and a config does not tell which; build the "
                "cache from the model"
            )
        return rotaries_of(model)
    return host_of(model).rotaries()


def _identity(model: Any) -> str:
    """See `sampled`. Raises SpecError if this process has only a part of the model."""
    if is_parallel(model):
        raise SpecError(
            f"a calibrated policy fits a whole model, but this process has only a part of a "
            f"{type(model).__name__}; use another policy"
        )
    return sampled(model)
