"""The parts of a layer's slots to which the native library appends tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import singledispatch
from typing import NamedTuple

from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.errors import CapacityError, OutOfMemoryError
from kvkeep.layer.block_encoded import BlockEncoded
from kvkeep.layer.cursor import Turn
from kvkeep.layer.parted import Parted
from kvkeep.layer.slots import Codecs, LayerSlots
from kvkeep.layer.undivided import Undivided
from kvkeep.planes import Planes, narrowed, unsliced
from kvkeep.storage import Storage


class StepPart(NamedTuple):
    """A part of a layer's slots to which each step appends tokens: a storage, or one row or head of
    it, after the segments `before`, which steps do not change.

    `row`, `head`: index of the part's only row or head; None: all. `place`: the row's index in the
    storage; the storage may hold all heads. `behind`: the slots, the last of `before`, to which
    this part's tokens move, if the part is a plain tail.
    """

    codecs: Codecs
    storage: Storage
    before: tuple[Segment, ...] = ()
    row: int | None = None
    head: int | None = None
    place: int = 0
    behind: StepPart | None = None

    @property
    def planes(self) -> Planes:
        """The planes of the part, with spare slots: (b, h, capacity, ...)."""
        planes = unsliced(self.storage.read())
        if self.row is not None:
            planes = {name: plane.narrow(0, self.place, 1) for name, plane in planes.items()}
        return planes if self.head is None else narrowed(planes, None, self.head)

    def segments(self) -> tuple[Segment, ...]:
        """The segments that its queries attend to; the last has spare slots."""
        return (*self.before, Segment(self.planes, *self.codecs))

    def of(self, x: Tensor, heads: int) -> Tensor:
        """Select the part's rows and heads of x, (B, heads * group, n, D)."""
        if self.row is not None:
            x = x.narrow(0, self.row, 1)
        return x if self.head is None else x.chunk(heads, dim=1)[self.head]


@singledispatch
def step_parts(slots: LayerSlots) -> tuple[StepPart, ...]:
    """The parts to which a step appends tokens; empty if a step cannot be described so."""
    return ()


@step_parts.register
def _(slots: Parted) -> tuple[StepPart, ...]:
    return tuple(
        StepPart(slots.codecs, part.storage, (), row, part.head, place)
        for part in slots.storage.parts
        for place, row in enumerate(
            range(slots.storage.batch) if part.rows is None else part.rows.tolist()
        )
    )


@step_parts.register
def _(slots: Undivided) -> tuple[StepPart, ...]:
    if slots.aside.length or slots.frozen.hides or not slots.storage.length:
        return ()
    return (StepPart(slots.codecs, slots.storage, slots.segments()[:-1]),)


@step_parts.register
def _(slots: BlockEncoded) -> tuple[StepPart, ...]:
    """The parts of a plain tail: one, or one for each head if the blocks have a part for each."""
    coded, behind = slots.blocks.segments(), tuple[StepPart, ...]()
    if slots.by_token and coded:
        behind = step_parts(slots.blocks)
        if not behind or behind[0].before:
            return ()
    for tail in step_parts(slots.tail):
        if not slots.ragged:
            own = tail._replace(before=coded + tail.before, behind=behind[0] if behind else None)
            return (own,)
        found = []
        for head in range(tail.planes["k"].shape[1]):
            before = tuple(x.narrowed(None, head) for x in tail.before)
            own = tail._replace(before=before, row=0, head=head)
            if coded:
                first = coded[head]._replace(head=None, rows=None, part=False)
                own = own._replace(before=(first, *before))
            if behind:
                own = own._replace(behind=behind[head]._replace(row=None, head=None))
            found.append(own)
        return tuple(found)
    return ()


@singledispatch
def step_state(slots: LayerSlots) -> tuple[object, ...]:
    """A key that stays equal as long as `step_parts` does."""
    return ()


@step_state.register
def _(slots: Parted) -> tuple[object, ...]:
    return slots.storage.storages


@step_state.register
def _(slots: Undivided) -> tuple[object, ...]:
    return slots.storage, slots.frozen, slots.aside.length


@step_state.register
def _(slots: BlockEncoded) -> tuple[object, ...]:
    length = slots.blocks.length
    fixed = length > 0 if slots.by_token else length
    return fixed, step_state(slots.blocks), step_state(slots.tail)


def count_slots(
    storages: Sequence[Storage], lengths: list[int], capacities: Sequence[int], left: Sequence[int]
) -> bool:
    """Set the lengths of storages to those `left` by a step, and free spare capacity. Return
    whether all slots kept their addresses."""
    stay = True
    for index, length in enumerate(left):
        if length < lengths[index]:
            storages[index].truncate(length)
            stay &= storages[index].capacity == capacities[index]
        else:
            storages[index].extend_to(length)
        lengths[index] = length
    return stay


def grow_slots(needs: Sequence[tuple[Storage, int]], turn: Turn) -> None:
    """Allocate slots in each storage that has fewer than it needs, if there is memory; the layer's
    turn is taken meanwhile."""
    if any(slots > storage.capacity for storage, slots in needs):
        with suppress(CapacityError, OutOfMemoryError), turn:
            for storage, slots in needs:
                storage.grow_for(slots)
