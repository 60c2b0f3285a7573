"""The records of a decode step (one token a row) for the native library (`native/abi.h`).

Values that stay the same from step to step are packed once for each part of a layer's slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Centre, Options, Segment
from kvkeep.attention.native import CALL, REACH, call_of_step, pack_centre, pack_segments
from kvkeep.codec.groups import ENCODING, encoding
from kvkeep.layer.decode.parts import StepPart
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import TYPES, address_of
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, Chunks, OwnWindow, Planes, Reach
from kvkeep.policy import Policy
from kvkeep.policy.normal_queries import Queries
from kvkeep.policy.ranking import RANKING
from kvkeep.policy.rule import Rule
from kvkeep.rotary import Rotary
from kvkeep.storage.buffer import slots_record

# Layouts of native/abi.h; absent pointers are 0.
_PLACE, _SCORES, _RULE, _NUMBER = Struct("=6q"), Struct("=5q"), Struct("=6q2d2q"), Struct("=q")
MOST_SCORES = 3  # KV_SCORES
TOKENS, SEQUENCE, _KIND = Struct("=14q"), Struct("=19q"), Struct("=13q2d")
"""Layouts of KvTokens, KvSequence and KvKind."""


class Layout(NamedTuple):
    """The layout of queries, keys or values of one token a row; strides are in elements."""

    rows: int
    heads: int
    width: int
    by_row: int  # 0 if there is one row
    by_head: int
    by_element: int
    dtype: torch.dtype
    device: torch.device


class Kind(NamedTuple):
    """The properties of a step's inputs on which the packed records depend."""

    q: Layout
    k: Layout
    v: Layout
    scale: float
    softcap: float | None


class PartRecords(NamedTuple):
    """The packed records of one part, and the memory to which they point."""

    part: StepPart
    described: bytes | None
    """The storage's description of its planes."""
    capacity: int
    addresses: tuple[int, int, int, int]
    """The first fields of a KvSequence."""
    kept: tuple[object, ...]
    """The memory of the records, without the segments."""
    segments: tuple[bytes, list[Tensor]]
    memory: Tensor | None
    """The memory (B, H, n) of a KvRule that ranks by keys; None: the rule does not, or the part is
    a tail. If a head's first number is 0, its slots must be read again."""
    behind: PartRecords | None = None
    """The records of the encoded slots behind a plain tail; None: the part is no tail."""

    @property
    def moved(self) -> bool:
        """Whether the slots have other addresses than the records."""
        if self.part.storage.described() is not self.described:
            return True
        return self.behind is not None and self.behind.moved


class LayerRecords(NamedTuple):
    """The values that the records of all parts of a layer share.

    The library writes the number of slots in use after a step to `left`, int64 (2 * parts,): of the
    parts, then of the slots behind them. `like`: inputs of all steps, whose tensors need no memory.
    """

    policy: Policy
    rule: Rule
    value_width: int
    window: OwnWindow | None
    pads: Tensor | None
    slopes: Tensor | None
    centre: Centre | None
    rotary: Rotary | None
    left: Tensor
    like: StepInputs

    def of(self, index: int, part: StepPart, old: PartRecords | None = None) -> PartRecords:
        """Pack the records of the part with this index. `old`: those before its slots moved."""
        q, k, v = (part.of(x, self.like.k.shape[1]) for x in self.like[:3])
        inputs = self.like._replace(q=q, k=k, v=v)
        tensors: list[Tensor] = []
        planes = part.planes
        used = (*part.before, Segment(planes, *part.codecs))
        behind, centre = None, self.centre
        if centre is not None:
            rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
            heads = slice(None) if part.head is None else slice(part.head, part.head + 1)
            centre = centre._replace(held=centre.held[rows, heads])
        if part.behind is not None:  # it takes its tokens from the tail
            k, v = (planes[name].narrow(2, 0, 1) for name in ("k", used[-1].value_name))
            index_behind = index + len(self.left) // 2
            own = self._replace(centre=centre, like=inputs._replace(k=k, v=v))
            behind = own.of(index_behind, part.behind, None if old is None else old.behind)
            k = inputs.k
        segments = pack_segments(used, q, tensors)
        described = part.storage.described()
        if old is not None and old.described is described:  # only the slots behind have moved
            addresses = old.addresses[0], address_of(segments), *old.addresses[2:]
            return old._replace(
                part=part, addresses=addresses, segments=(segments, tensors), behind=behind
            )
        # Only the slots behind a tail are ranked.
        memory = None
        if self.rule.by_keys and behind is None:
            memory = _memory(planes, k.shape[3], None if old is None else old.memory)
        held: list[Tensor] = []
        packed = None if centre is None else pack_centre(centre, q, held)
        step = self._step(index, part, planes, inputs, memory, packed)
        slots = slots_record(planes)
        first, second, third = map(address_of, (step, segments, slots))
        return PartRecords(
            part,
            described,
            planes[POSITION].shape[2],
            (first, second, third, len(planes)),
            (step, slots, packed, held, self.pads, self.slopes, self.left),
            (segments, tensors),
            memory,
            behind,
        )

    def queries(
        self,
        state: Mapping[str, Tensor],
        positions: Sequence[int],
        interval: int,
        parts: Sequence[PartRecords],
    ) -> tuple[Queries, bytes]:
        """Copies of the queries in a policy's state, to which a step that renews scores adds its
        own, and their packed KvQueries, one for each part. `positions`: of the rows' tokens."""
        first, due = self.policy.protection.sinks, interval
        more = [place >= first and (place + 1) % due == 0 for place in positions]
        _, heads, _, width = self.like.q.shape
        group, rule = heads // self.like.k.shape[1], self.rule._replace(interval=interval)
        held = Queries.copied(state, more, heads, width)
        packed = [
            held.packed(one.part.row or 0, group * (one.part.head or 0), self.rotary, rule)
            for one in parts
        ]
        return held, b"".join(packed)

    def _step(
        self,
        index: int,
        part: StepPart,
        planes: Planes,
        inputs: StepInputs,
        memory: Tensor | None,
        centre: bytes | None,
    ) -> bytes:
        """A KvStep."""
        q, k, v = inputs[:3]
        policy = self.policy
        heads = planes["k"].shape[1]
        keys, values = part.codecs.key.layout, part.codecs.value.layout
        assert keys is not None  # `possible` has checked it
        assert values is not None
        # Values that are elements of the keys are written with the keys: pass 0 rows of values.
        within = part.codecs.value.of_keys
        written = encoding(*((v[:0], planes, "k", PLAIN) if within else (v, planes, "v", values)))
        place = planes[POSITION]
        rows, position_heads, _ = place.shape
        places = place.data_ptr(), *place.stride()
        scores = [planes[name] for name in self.rule.enter]
        score = (scores[0].data_ptr(), *scores[0].stride()[:2]) if scores else (0, 0, 0)
        pads = 0 if self.pads is None or part.row is not None else self.pads.data_ptr()
        chunked = isinstance(self.window, Chunks)
        own = (policy.reach, None if chunked or self.window is None else Reach(self.window))
        reaches = [reach for reach in own if reach is not None]
        slopes = self.slopes
        if slopes is not None and part.head is not None:
            slopes = slopes[part.head * q.shape[1] :]
        options = Options(inputs.scale, inputs.softcap, slopes=slopes)
        at = 0 if centre is None else address_of(centre)
        call = call_of_step(q, heads, self.value_width, len(part.before) + 1, options, at)
        return b"".join(
            [
                CALL.pack(*call),
                ENCODING.pack(*encoding(k, planes, "k", keys)),
                ENCODING.pack(*written),
                _PLACE.pack(*places, 0, position_heads),
                RANKING.pack(
                    *(score[0], places[0], 0, 0, *score[1:], *places[1:3], 0),
                    *(rows, position_heads, 0, 1, 0, *policy.protection[1:]),
                    *(self.window or 0, chunked),
                ),
                self._rule(scores, memory),
                _NUMBER.pack(pads),
                *(REACH.pack(*reach) for reach in (*reaches, *[Reach(0)] * (2 - len(reaches)))),
                _NUMBER.pack(len(reaches)),
                _NUMBER.pack(self.left.data_ptr() + 8 * index),
            ]
        )

    def _rule(self, scores: list[Tensor], memory: Tensor | None) -> bytes:
        """A KvRule."""
        rule = self.rule
        entered = zip(scores, rule.enter.values(), strict=True)
        planes = [
            _SCORES.pack(x.data_ptr(), *x.stride()[:2], x.shape[1], enter) for x, enter in entered
        ]
        planes += [_SCORES.pack(*(0,) * 5)] * (MOST_SCORES - len(planes))
        mixes = rule.mix is not None
        by_keys = memory is not None
        numbers = len(scores), rule.learn, rule.by_query, by_keys, mixes, rule.seed
        kept = (0, 0) if memory is None else (memory.data_ptr(), memory.shape[2])
        return b"".join([*planes, _RULE.pack(*numbers, rule.fade, rule.mix or 0.0, *kept)])


def _memory(planes: Planes, key_width: int, old: Tensor | None) -> Tensor:
    """The memory of a KvRule that ranks by keys. `old`: its memory before the slots moved, whose
    numbers are copied."""
    rows, heads, capacity = planes["k"].shape[:3]
    width = key_width + -key_width % 32
    numbers = 4 + width + width // 2 + capacity
    with torch.inference_mode(False):  # so that it can be changed outside inference mode too
        memory = torch.zeros((rows, heads, numbers), dtype=torch.int64)
    if old is not None:
        known = min(numbers, old.shape[2])
        memory[:, :, :known] = old[:, :, :known]
    return memory


def step_tokens(inputs: StepInputs, out: Tensor) -> bytes:
    """The packed KvTokens for one row that holds one token of each sequence.

    Args:
        out: output tensor, with the shape of the queries but the width of values.
    """
    q, k, v, position = inputs[:4]
    group, size = q.shape[1] // k.shape[1], q.element_size()
    read = position is not None and position.dtype is torch.int32 and position.is_contiguous()
    places = (position.data_ptr(), position.numel()) if position is not None and read else (0, 0)
    return TOKENS.pack(
        *(x.data_ptr() for x in (q, k, v, out)),
        *places,
        *(size * x.stride(2) for x in (q, k, v, out)),
        *(size * n * x.stride(1) for n, x in ((group, q), (1, k), (1, v), (group, out))),
    )


def is_read(position: Tensor, rows: int) -> bool:
    """Whether the library can read the positions of one token a row in place."""
    fits = position.shape in ((1,), (rows, 1))
    return fits and position.is_cpu and position.dtype is torch.int32 and position.is_contiguous()


_kinds: dict[Kind, Kind] = {}
_MOST_KINDS = 1024


def kind_of(inputs: StepInputs) -> Kind:
    """The kind of a step's inputs, whatever their number of tokens; equal kinds are one object."""
    q, k, v = map(_layout, inputs[:3])
    kind = Kind(q, k, v, inputs.scale, inputs.softcap)
    if len(_kinds) == _MOST_KINDS:
        _kinds.clear()
    return _kinds.setdefault(kind, kind)


def is_like(inputs: StepInputs, kind: Kind) -> bool:
    """Whether inputs are of a kind, even if `exactly` differs."""
    plain = all(
        type(x) is Tensor and x.dim() == 4 and x.shape[2] == 1 and not x.is_neg()
        for x in inputs[:3]
    )
    return plain and kind_of(inputs) is kind


def _layout(x: Tensor) -> Layout:
    rows, heads, _, width = x.shape
    by_row, by_head, _, by_element = x.stride()
    by_row = by_row if rows > 1 else 0
    return Layout(rows, heads, width, by_row, by_head, by_element, x.dtype, x.device)


def packed_kind(kind: Kind) -> bytes:
    """A kind packed as a KvKind of native/abi.h."""
    layouts = [n for x in kind[:3] for n in (x.heads, x.width, x.by_row, x.by_head)]
    return _KIND.pack(*layouts, TYPES[kind.q.dtype], kind.scale, kind.softcap or 0.0)


def without_memory(inputs: StepInputs) -> StepInputs:
    """Inputs with the same layout, dtypes and numbers, but tensors without memory."""
    q, k, v = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs[:3]
    )
    return StepInputs(q, k, v, None, inputs.scale, inputs.softcap)


def exactly(inputs: StepInputs) -> tuple[object, ...]:
    """A key that is equal only for inputs with the same packed records."""
    q, k, v = inputs[:3]
    return (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(q), type(k), type(v)),
        *(q.is_neg(), k.is_neg(), v.is_neg(), inputs.scale, inputs.softcap),
    )


def strides_of(inputs: StepInputs, out: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of KvTokens, in bytes: by row for q, k, v and the output, then by kv head."""
    q, k, v = inputs[:3]
    size, group = q.element_size(), q.shape[1] // k.shape[1]
    rows = (*(x.stride(0) for x in (q, k, v)), out[1] * out[3])
    heads = (group * q.stride(1), k.stride(1), v.stride(1), group * out[3])
    return tuple(size * stride for stride in (*rows, *heads))
