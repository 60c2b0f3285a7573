"""Setup: what never changes in a layer, and how it chooses the layout of its slots."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from kvkeep.codec import Codec, WithinKeys, keeps_plain
from kvkeep.errors import SpecError
from kvkeep.layer.block_encoded import BlockEncoded
from kvkeep.layer.parted import ByHead
from kvkeep.layer.sight import Sight
from kvkeep.layer.slots import Codecs, Decode, LayerSlots
from kvkeep.layer.step import Slopes
from kvkeep.layer.undivided import Undivided
from kvkeep.planes import Chunks, OwnWindow, Planes, own_window
from kvkeep.policy import Policy
from kvkeep.rotary import Rotary
from kvkeep.storage import Storage


class LayerOptions(TypedDict, total=False):
    """Options of a `LayerCache` that depend on the model only."""

    chunked: bool
    rotary: Rotary | None
    readers: int
    slopes: Slopes | None
    latent: int | None


class ModelLayer(NamedTuple):
    """The properties of a model's layer that its cache needs; see `LayerCache`."""

    window: OwnWindow | None
    rotary: Rotary | None = None
    readers: int = 0
    slopes: Slopes | None = None
    latent: int | None = None

    @classmethod
    def of(cls, window: int | None, chunked: bool = False, **options: Any) -> ModelLayer:
        """The properties, with a window of `window` tokens."""
        return cls(own_window(window, chunked), **options)


class Setup:
    """A layer's policy, codecs and limits. For the arguments and errors see `LayerCache`.

    Attributes:
        own: names of the planes that the policy changes.
        sight: the limits on the slots that a query sees.
        by_token: whether drafts are fed one by one, because evictions depend on more than
            positions.
    """

    def __init__(
        self, policy: Policy, key_codec: Codec, value_codec: Codec, model: ModelLayer
    ) -> None:
        window, latent = model.window, model.latent
        sight = Sight(policy, window)
        if (policy.evicts or policy.ragged) and not (
            key_codec.rewritable and value_codec.rewritable
        ):
            raise SpecError(
                f"{sight.own_limit or f'policy {policy.name}'} evicts single slots, but codec "
                f"{key_codec.name}/{value_codec.name} encodes blocks of tokens; use int8 or "
                "int8/int4, or keep_all on layers without a sliding window"
            )
        value_codec = value_codec.for_values()
        if latent is not None:
            if value_codec != key_codec.for_values():
                raise SpecError(
                    f"codecs {key_codec.name}/{value_codec.name}: the values of a latent layer are "
                    f"elements of its keys, so both have one codec; use {value_codec.name}"
                )
            key_codec = key_codec.for_latents()
            value_codec = WithinKeys(key_codec, latent)
        self.policy = policy = policy.in_layer(0, 1)
        self.codecs = _within_reach(policy, window, Codecs(key_codec, value_codec))
        self.sight = sight._replace(policy=policy)
        self.window, self.rotary, self.slopes = window, model.rotary, model.slopes
        self.own, self.by_token = tuple(policy.planes), not _settles_alone(policy)
        kind = f"{policy} {key_codec} {value_codec} window={window}"
        self.kind = f"{kind} chunked" if isinstance(window, Chunks) else kind

    def decoded(self, of: Decode, planes: Planes) -> Tensor:
        """Keys or values of encoded slots, in float32."""
        return of(self.codecs, planes, torch.float32)

    def slots(self, storage: Storage) -> LayerSlots:
        """The slots of an empty layer, held by `storage`."""
        policy, codecs = self.policy, self.codecs
        key, value = codecs
        if (storage.limit or policy.budget or 0) < (policy.budget or 0):
            raise SpecError(
                f"policy {policy.name} keeps {policy.budget} slots, but {storage.name} storage "
                f"holds {storage.limit}; use @fixed:{policy.budget} or more"
            )
        if key.block != value.block:
            raise SpecError(
                f"codecs {key.name}/{value.name} encode {key.block} and {value.block} tokens "
                "together; use one codec for both, or two that encode each token separately, such "
                "as int8/int4"
            )
        # The most slots that stay after a step; 0: a number that changes; None: all slots stay.
        storage.bound = policy.most_slots or (0 if policy.evicts else None)
        if policy.ragged and storage.bound is not None:
            storage.bound = 0  # a head's share of a budget changes
        late = keeps_plain(key, value) and storage.lasting and storage.limit is None
        if key.block > 1 or late:
            return BlockEncoded(codecs, storage, self.own, ragged=policy.ragged)
        if policy.ragged:
            return ByHead(codecs, storage)
        return Undivided(codecs, self.own, storage)


def _within_reach(policy: Policy, window: OwnWindow | None, codecs: Codecs) -> Codecs:
    """The codecs with plain tokens that a policy's reach keeps: fewer than half of the newest
    tokens, and the first ones if they stay visible. So the slots that leave the reach are encoded.
    """
    reach = policy.reach
    if reach is None:
        return codecs
    most = (reach.size - 1) // 2
    first = min(most // 2, 0 if window else reach.sinks, max(codec.sinks for codec in codecs))
    return Codecs(*(codec.with_tail(most - first, first) for codec in codecs))


def _settles_alone(policy: Policy) -> bool:
    """Whether a decode step under this policy changes only the new token's slot and slots that left
    the reach."""
    reach = policy.reach
    bounded = reach is not None and policy.budget == reach.size + reach.fixed
    looks_on = policy.observes or policy.needs or policy.planes
    return (not policy.evicts or bounded) and not looks_on
