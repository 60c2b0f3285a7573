"""What a layer begins with: the tokens that another layer holds, in this layer's encoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvkeep.layer.frozen import FrozenPlanes, FrozenRuns, Run
from kvkeep.layer.slots import Codecs
from kvkeep.planes import POSITION, part, slot_count

if TYPE_CHECKING:
    from kvkeep.layer.layer import LayerCache


def runs_for(layer: LayerCache, text: LayerCache) -> Iterator[Run]:
    """The slots of `text`, whose rows have had no padding, as runs that `layer` can adopt: with the
    planes of its policy, and encoded as it encodes new tokens.

    Keys and values are shared where both encode alike and no slot was moved or hidden. The policy
    is shown keys and values as `text` holds them.
    """
    text.freeze()
    frozen: FrozenRuns = text.slots.frozen
    geometry = text.history.geometry
    codecs = Codecs(text.key_codec, text.value_codec)
    if geometry is None:
        return
    for planes in frozen.placed(codecs.key):
        if not slot_count(planes):  # all of its slots are hidden
            continue
        position = planes[POSITION][0, 0]
        k = codecs.key.decode(part(planes, "k"), geometry.dtype)
        v = codecs.value.decode(part(planes, "v"), geometry.dtype)
        own = layer.own_planes(k, v, position)
        alike = codecs == layer.slots.codecs
        slots = {n: planes[n] for n in planes} if alike else layer.slots.codecs.encode(k, v)
        slots[POSITION] = own.pop(POSITION)
        mine = {n: x.expand(geometry.rows, *x.shape[1:]).clone() for n, x in own.items()}
        yield Run(FrozenPlanes(slots), mine)
