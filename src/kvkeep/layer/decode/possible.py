"""Which layers' decode steps the native library can make."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.native import reads
from kvkeep.layer.decode.parts import StepPart, step_parts
from kvkeep.layer.decode.records import MOST_SCORES
from kvkeep.layer.step import StepInputs
from kvkeep.layer.writing import Writer
from kvkeep.native_library import LIBRARY
from kvkeep.packing import PLAIN
from kvkeep.planes import slot_count, unsliced
from kvkeep.policy.base import rule_of
from kvkeep.policy.rule import Enter, Learn, Rule
from kvkeep.rotary import Rotary


def planned_parts(writer: Writer, inputs: StepInputs) -> tuple[StepPart, ...]:
    """The parts in which the native library can make decode steps with inputs like `inputs`, which
    were the last step's; empty if it cannot."""
    cursor, policy = writer.cursor, writer.policy
    rule, slots = rule_of(policy), cursor.slots
    if LIBRARY is None or rule is None or cursor.history.geometry is None:
        return ()
    q, k, v = inputs[:3]
    plain = all(
        x.is_cpu and x.stride(3) == 1 and type(x) is Tensor and not x.is_neg() for x in (q, k, v)
    )
    if not plain or inputs.special:
        return ()
    if cursor.readers and policy.evicts and policy.reach is None:
        return ()  # the layer settles only after its readers have attended
    parts = step_parts(slots)
    if cursor.readers and any(x.behind for x in parts):
        return ()  # a token leaves the tail only after the readers have attended to it
    if policy.ragged and (q.shape[0] > 1 or len(parts) != k.shape[1]):
        return ()
    learns = rule.learn != Learn.NOTHING or rule.interval
    if learns and any(x.before and not x.behind for x in parts):
        return ()  # the policy's planes of frozen slots lie in other memory
    if rule.interval and not (rule.future and _is_read(writer.setup.rotary)):
        return ()
    if Enter.ERROR in rule.enter.values() and slots.late and not any(x.behind for x in parts):
        return ()  # there are no codes yet, to find the errors that tokens will have
    return parts if all(_possible(part, inputs, rule) for part in parts) else ()


def _is_read(rotary: Rotary | None) -> bool:
    """Whether the library can turn queries back by a rotary embedding."""
    if rotary is None:
        return True
    frequencies = rotary.inv_freq
    plain = frequencies.is_cpu and frequencies.dtype is torch.float32
    return plain and frequencies.is_contiguous() and rotary.beside is None


def _possible(part: StepPart, inputs: StepInputs, rule: Rule) -> bool:
    """Whether the library can make a decode step in this part with inputs like `inputs`."""
    q, k, v = (part.of(x, inputs.k.shape[1]) for x in inputs[:3])
    if part.storage.described() is None or len(rule.enter) > MOST_SCORES:
        return False
    for segment in part.segments():
        planes = unsliced(segment.planes)
        if segment.rotation is not None or not reads(q, segment):
            return False
        if any(plane.dim() == 4 and plane.stride(3) != 1 for plane in planes.values()):
            return False
    own = inputs._replace(q=q, k=k, v=v)
    if part.behind is not None and not _possible(part.behind, own, rule):
        return False
    planes, codecs = part.planes, part.codecs
    tail = ((codecs.key, k, "k"), (codecs.value, v, "k" if codecs.value.of_keys else "v"))
    return (
        all(codec.layout != PLAIN or planes[name].dtype is x.dtype for codec, x, name in tail)
        and all(planes[x].dtype is torch.float32 and planes[x].stride(2) == 1 for x in rule.enter)
        and slot_count(planes) > 0
    )
