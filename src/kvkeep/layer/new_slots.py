"""Chooses the `LayerSlots` class for a layer's codecs, storage and policy."""

from __future__ import annotations

from collections.abc import Collection

from kvkeep.codec import Codec
from kvkeep.errors import SpecError
from kvkeep.layer.block_encoded import BlockEncoded
from kvkeep.layer.parted import ByHead
from kvkeep.layer.slots import Codecs, LayerSlots
from kvkeep.layer.undivided import Undivided
from kvkeep.storage import Storage


def new_slots(
    key_codec: Codec,
    value_codec: Codec,
    storage: Storage,
    *,
    own: Collection[str] = (),
    ragged: bool = False,
    budget: int | None = None,
    tail: bool = False,
) -> LayerSlots:
    """Make the slots of an empty layer.

    Args:
        key_codec, value_codec: encode keys and values, with the same block length.
        storage: holds the slots; the result takes ownership.
        own: names of the planes that a policy changes.
        ragged: heads may have different lengths.
        budget: most slots that stay after a step; 0: the policy evicts to a number that changes;
            None: the policy keeps all slots.
        tail: whether the newest tokens stay plain for a while, if the storage grows.

    Raises:
        SpecError: the codecs, the storage and ragged heads cannot be combined.
    """
    codecs = Codecs(key_codec, value_codec)
    if key_codec.block != value_codec.block:
        raise SpecError(
            f"codecs {key_codec.name}/{value_codec.name} encode {key_codec.block} and "
            f"{value_codec.block} tokens together; use one codec for both, or two that encode "
            "each token separately, such as int8/int4"
        )
    # A head's share of a budget changes.
    storage.bound = 0 if ragged and budget is not None else budget
    if key_codec.block > 1 or (tail and storage.lasting and not storage.limited):
        return BlockEncoded(codecs, storage, own, ragged=ragged)
    return ByHead(codecs, storage) if ragged else Undivided(codecs, own, storage)
