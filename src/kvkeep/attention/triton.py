"""The Triton backend, for CUDA: reads every slot once, in its encoded form, without a copy.

Each segment is one launch over splits of its slots; one more launch merges the results. Nothing
waits for the device, and lengths may be tensors, so a CUDA graph can capture a call.
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import tiles
from kvkeep.attention.options import Options
from kvkeep.attention.tiles import power_of_two
from kvkeep.attention.view import Decoder, Segment, View
from kvkeep.checks import wants_gradients
from kvkeep.packing import PACKINGS, KernelLayout
from kvkeep.planes import LAST, POSITION, Planes, Reach, unsliced

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_WIDTH = 256
_MOST_REACHES = 3
_MOST_PAIRS = 65535
_OLDEST = (8, 0)  # first compute capability with bfloat16 and asynchronous copies
_STORED_WEIGHTS = 64
"""Most queries per kv head (n * G) whose weights are stored for the mass, as in decode steps; the
weights of more queries are computed a second time."""

_MOST_ROWS = 128  # rows of one matrix product
_PROGRAMS = 2
"""Programs per multiprocessor. Codes have fewer bytes in flight and more arithmetic than floats, so
they need more programs to use the memory bandwidth; see `coded_tile`."""

_CODED_TILE = 8 << 10
"""Bytes of codes in a tile of keys."""

_FEWEST_SLOTS = 16  # slots in a tile, for tensor cores

_NO_REACH = Reach(LAST)


@cache
def reason() -> str:
    """The reason why the kernels cannot run on this machine; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton, or a torch that includes it"
    if interpreted():
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "the kernels contain NVIDIA PTX instructions, which ROCm does not run"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST:
        own, least = (".".join(map(str, c)) for c in (capability, _OLDEST))
        return f"{torch.cuda.get_device_name()} has compute capability {own}, below {least}"
    return ""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuses(q: Tensor, view: View, options: Options) -> str | None:
    """The reason why the kernels do not support this call, or None."""
    if not q.is_cuda and not (q.is_cpu and interpreted()):
        return "the Triton kernels run on CUDA only"
    if view.chosen is not None:
        return "the Triton kernels do not support a choice of slots per query"
    if torch.compiler.is_compiling():
        return "the Triton kernels cannot be traced; call them through a custom operation"
    if q.dtype not in _TYPES:
        return f"the Triton kernels compute in float32, less precise than {q.dtype}"
    if len(view.reaches) > _MOST_REACHES:
        return f"the kernels take at most {_MOST_REACHES} reaches, not {len(view.reaches)}"
    pairs = q.shape[0] * unsliced(view.segments[-1].planes)["k"].shape[1]
    if pairs > _MOST_PAIRS:
        return f"a CUDA launch takes {_MOST_PAIRS} rows x kv heads, not {pairs}"
    for segment in view.segments:
        k, v = (unsliced(segment.planes)[name] for name in ("k", segment.value_name))
        widths = q.shape[3], segment.value_width
        if max(widths) > _MOST_WIDTH:
            return f"the Triton kernels take heads up to {_MOST_WIDTH} wide, not {widths}"
        if wants_gradients(q, k, v, *([] if options.bias is None else [options.bias])):
            return "the Triton kernels have no gradients"
    return None


def readable(codec: Decoder, *, values: bool = False) -> KernelLayout | None:
    """The layout of a codec's planes if the kernels can read it; None: the planes must be decoded
    first. Scales by channel multiply the queries, one tile at a time, so only keys can have them,
    and tiles must divide the blocks."""
    layout = codec.layout
    if layout is None:
        return None
    by_channel = layout.block > 1
    return None if by_channel and (values or layout.block % _FEWEST_SLOTS) else layout


def yields(q: Tensor, view: View, options: Options) -> bool:
    """Whether torch's fused attention, faster for a prompt's first chunk, supports the call."""
    odd = (options.softcap, options.sinks, options.slopes, options.bias)
    return all(x is None for x in odd) and not options.need_mass and view.square


class Coded(NamedTuple):
    """A plane of keys or values in the form that a kernel reads."""

    plane: Tensor
    scale: Tensor
    zero: Tensor
    code: int
    parts: int
    """Elements per word of the plane."""
    width: int
    size: int
    """Elements that share a scale."""
    affine: bool
    block: int
    """Slots that share scales by channel; 1: scales by slot."""
    planes: tuple[int, ...] = (0, 0)
    """Bits of a code in each of two planes; `code` and `parts` then describe the codes that the
    kernels expand them to."""

    @classmethod
    def plain(cls, plane: Tensor) -> Coded:
        """A plane of floats."""
        plane, width = _along_width(plane), plane.shape[3]
        return cls(plane, plane, plane, 0, 1, width, width, False, 1)

    @classmethod
    def of(cls, planes: Planes, name: str, layout: KernelLayout, width: int) -> Coded:
        """The planes of a layout that the kernels can read."""
        if layout.packing == "plain":
            return cls.plain(planes[name])
        packing = PACKINGS[layout.packing]
        plane, code = _along_width(planes[name]), packing.number
        if packing.low:
            parts, code = 8 // packing.wide, PACKINGS[f"int{packing.wide}"].number
        else:
            plane, parts = _in_words(plane, width)
        scale, zero = planes[name + "_scale"], planes.get(name + "_zero")
        if zero is not None and zero.stride() != scale.stride():
            scale, zero = scale.contiguous(), zero.contiguous()
        size = layout.group if layout.block == 1 else width
        # The kernels assume a stride of 1 along the groups.
        scale = _along_width(scale)
        own_zero = scale if zero is None else _along_width(zero)
        affine, block = zero is not None, layout.block
        bits = packing.planes if packing.low else (0, 0)
        return cls(plane, scale, own_zero, code, parts, width, size, affine, block, bits)

    @property
    def groups(self) -> int:
        """Number of groups of elements, each with a scale; 1 for scales by channel."""
        return -(-self.width // self.size)

    def shape(self, name: str) -> dict[str, Any]:
        """The constants with which a kernel is compiled."""
        low, high = self.planes
        return {
            f"{name}_CODE": self.code, f"{name}_LOW": low, f"{name}_HIGH": high,
            f"{name}_PARTS": self.parts, f"{name}_SIZE": self.size,
            f"{name}_COUNT": self.groups, f"{name}_GROUPS": power_of_two(self.groups),
            f"{name}_AFFINE": self.affine, f"D{name}": self.width,
            # Words of a token, padded to the operand size of a matrix product.
            f"WIDE_{name}": max(16, power_of_two(self.width // self.parts)),
        }  # fmt: skip

    def strides(self, shared: bool) -> tuple[int, ...]:
        """Strides of row, head and slot, of the codes and of the scales."""
        rows = 0 if shared else 1
        codes, scales = self.plane.stride(), self.scale.stride()
        return (rows * codes[0], *codes[1:3], rows * scales[0], *scales[1:3])


def run(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
    """Attention of q (B, Hq, n, Dk) over the view, in q's dtype; sums are float32."""
    with on_device_of(q):
        return _run(q, view, options)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which x's device is current: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _run(q: Tensor, view: View, options: Options) -> tuple[Tensor, Tensor | None]:
    from kvkeep.kernels import merge

    rows, query_heads, n, _ = q.shape
    call = _Call(q, view, options)
    pieces = call.pieces
    parts = sum(piece.splits for piece in pieces)
    width = pieces[-1].v.width
    whole = q.new_empty((rows, n, query_heads, width))
    lse = q.new_empty((rows, n, query_heads), dtype=torch.float32)
    out, out_lse = whole, lse
    merged = parts > 1 or any(piece.rotated for piece in pieces)
    if merged:
        out = q.new_empty((parts, rows, n, query_heads, width), dtype=torch.float32)
        out_lse = q.new_empty((parts, rows, n, query_heads), dtype=torch.float32)
    done = 0
    for index, piece in enumerate(pieces):
        call.attend(piece, out, out_lse, done, first=index == 0)
        if piece.rotated:
            own = out[done : done + piece.splits]
            own.copy_(piece.segment.value_codec.rotate(own))
        done += piece.splits
    if merged:
        queries = rows * n * query_heads
        wide = power_of_two(width)
        merge.merge[(queries,)](
            out, out_lse, whole, lse, parts, queries, DV=width, WIDE=wide, BLOCK=16, num_warps=4
        )
    return whole.transpose(1, 2), call.mass(lse) if options.need_mass else None


class _Piece(NamedTuple):
    """A segment and its division into programs."""

    segment: Segment
    q: Tensor
    k: Coded
    v: Coded
    position: Tensor
    shared: bool
    rotated: bool
    """Whether the sums of values must be rotated back."""
    slots: int
    before: int
    kind: torch.dtype
    block_m: int
    block_n: int
    splits: int
    first: int
    """Index of its first slot among all slots."""
    first_tile: int


class _Call:
    """State that all launches of a call share."""

    def __init__(self, q: Tensor, view: View, options: Options) -> None:
        self.q, self.view, self.options = q, view, options
        self.rows, self.query_heads, self.n, _ = q.shape
        self.heads = unsliced(view.segments[-1].planes)["k"].shape[1]
        self.group = self.query_heads // self.heads
        used = any(segment.used is not None for segment in view.segments)
        # Without positions there is no bias.
        unbiased = options.slopes is None and options.bias is None
        self.dense = view.dense and not used and unbiased
        self.bias = None if options.bias is None else _along_width(options.bias.float())
        self.of_bias = (0, 0, 0, 1) if self.bias is None else self._strides_of_bias(self.bias)
        self.q_position = view.position.to(torch.int32).contiguous()
        bounds = view.bounds
        self.bounds = None if bounds is None else bounds.to(torch.int32).contiguous()
        stores = self.group * self.n <= _STORED_WEIGHTS and not options.peak
        self.second_pass = options.need_mass and not stores
        self.pieces: list[_Piece] = []
        first = first_tile = 0
        for index, segment in enumerate(view.segments):
            piece = self._piece(segment, first, first_tile, index == len(view.segments) - 1)
            self.pieces.append(piece)
            first += piece.slots
            first_tile += -(-piece.slots // piece.block_n)
        self.weights = self.tops = q
        if options.need_mass and not self.second_pass:
            lines = (self.rows, self.heads, self.n * self.group)
            # In half precision unless q is float32: the weights are written once and read once.
            half = q.dtype != torch.float32
            self.weights = q.new_empty((*lines, first), dtype=torch.float16 if half else q.dtype)
            self.tops = q.new_empty((*lines, first_tile), dtype=torch.float32)

    def _piece(self, segment: Segment, first: int, first_tile: int, own: bool) -> _Piece:
        planes = segment.token_planes
        q = self.q if segment.rotation is None else segment.queries(self.q)
        centre = self.options.centre
        if centre is not None:  # the keys are decoded for each row
            planes = {n: x.expand(self.rows, *x.shape[1:]) for n, x in planes.items()}
        layout = readable(segment.key_codec) if centre is None else None
        if layout is not None:
            q = segment.key_codec.rotate(q)
            k = Coded.of(planes, "k", layout, q.shape[3])
        else:
            k = Coded.plain(segment.keys(q.dtype, centre))
        layout = readable(segment.value_codec, values=True)
        if layout is not None:
            v = Coded.of(planes, segment.value_name, layout, segment.value_width)
        else:
            v = Coded.plain(segment.values(q.dtype))
        rotated = layout is not None and layout.hadamard
        q = _along_width(q)
        slots = segment.slots
        shared = k.plane.shape[0] != self.rows
        position = planes[POSITION]
        plain = {x.plane.dtype for x in (k, v) if not x.code}
        kind = self.q.dtype if plain <= {self.q.dtype} else torch.float32
        lines = self.n * self.group * (self.rows if shared else 1)  # queries of a kv head
        few, many = sorted((power_of_two(k.groups), power_of_two(v.groups)))
        exact = kind == torch.float32  # no tensor cores, so few queries at a time
        most = min(16 if exact else 64, _MOST_ROWS // many)
        block_m = max(16 // few, min(power_of_two(lines), most), 1)
        coded = bool(k.code and v.code) and block_m * many <= 16
        block_n, programs = 32 if exact else 64, _PROGRAMS
        if coded and not exact:
            block_n, programs = coded_tile(k, v, self.options.need_mass)
        if tiles.small(self.q.device) and max(k.width, v.width) > 128:
            block_m, block_n = max(16 // few, min(block_m, 32 // many), 1), 32
        if k.block > 1:
            block_n = math.gcd(block_n, k.block)
        pairs = self.heads * (1 if shared else self.rows) * -(-lines // block_m)
        at_once = programs * tiles.processors(self.q.device)
        return _Piece(
            segment, q, k, v, position, shared, rotated, slots,
            slots - self.n if own else slots, kind, block_m, block_n,
            tiles.splits(pairs, -(-slots // block_n), at_once),
            first, first_tile,
        )  # fmt: skip

    def _shape(self, piece: _Piece) -> dict[str, Any]:
        """The constants for compiling a kernel."""
        return {
            "HEADS": self.heads, "GROUP": self.group, "DENSE": self.dense,
            "REACHES": len(self.view.reaches), "SOFTCAP": self.options.softcap is not None,
            "TYPE": kernel_type(piece.kind), "BLOCK_N": piece.block_n,
            "K_BLOCK": piece.k.block, **piece.k.shape("K"),
        }  # fmt: skip

    def _strides_of_bias(self, bias: Tensor) -> tuple[int, int, int, int]:
        """The strides of rows, heads and queries, and the number of distances."""
        row, head, query, _ = bias.stride()
        return row, head, query, bias.shape[3]

    def _limits(self) -> tuple[int, ...]:
        """The reaches as integers, padded to `_MOST_REACHES`."""
        reaches = [*self.view.reaches, _NO_REACH, _NO_REACH, _NO_REACH][:_MOST_REACHES]
        return tuple(min(x, LAST) for reach in reaches for x in reach)

    def _query_rows(self) -> tuple[int, int]:
        """The strides of rows of the queries' positions and bounds; 0 if the rows share them."""
        position, bounds = self.q_position, self.bounds
        return (
            self.n if position.dim() == 2 and len(position) > 1 else 0,
            2 * self.n if bounds is not None and bounds.dim() == 3 and len(bounds) > 1 else 0,
        )

    def _position_strides(self, piece: _Piece) -> tuple[int, int, int]:
        row, head, slot = piece.position.stride()
        return 0 if piece.shared else row, head if piece.position.shape[1] > 1 else 0, slot

    def attend(self, piece: _Piece, out: Tensor, lse: Tensor, part: int, *, first: bool) -> None:
        """Launch the splits of one segment, which write their partial results."""
        from kvkeep.kernels import attend

        k, v, options = piece.k, piece.v, self.options
        lines = self.n * self.group * (self.rows if piece.shared else 1)
        grid = (
            -(-lines // piece.block_m),
            piece.splits,
            self.heads * (1 if piece.shared else self.rows),
        )
        attend.attend[grid](
            piece.q, k.plane, k.scale, k.zero, v.plane, v.scale, v.zero,
            piece.position, self.q_position, self.bounds, piece.segment.used,
            options.sinks if first else None, options.slopes, self.bias, None, None, out, lse,
            self.weights, self.tops,
            *piece.q.stride()[:3], *k.strides(piece.shared), *v.strides(piece.shared),
            *self._position_strides(piece), *self._query_rows(),
            self.rows, self.n, *self.of_bias, piece.slots, piece.before, piece.splits, part,
            self.weights.shape[-1], piece.first, piece.first_tile, self.tops.shape[-1],
            float(options.scale), float(options.softcap or 1.0), *self._limits(),
            SHARED=piece.shared, MASS=options.need_mass and not self.second_pass,
            BLOCK_M=piece.block_m,
            num_warps=warps(k, v, piece.block_m),
            num_stages=tiles.stages(piece.block_n, k.plane, v.plane),
            **self._shape(piece), **v.shape("V"),
        )  # fmt: skip

    def mass(self, lse: Tensor) -> Tensor:
        """The mass (B, H, S), given the log-sum-exp of the whole call."""
        from kvkeep.kernels import merge, weigh

        slots = sum(piece.slots for piece in self.pieces)
        mass = self.q.new_zeros((self.rows, self.heads, slots), dtype=torch.float32)
        seen = self.view.observed(self.options.observed)
        seen_row = 0 if seen is None or seen.shape[0] == 1 else self.n
        pairs = self.rows * self.heads
        for piece in self.pieces:
            if not self.second_pass:
                merge.receive[(-(-piece.slots // 256), pairs)](
                    self.weights, self.tops, lse, seen, piece.segment.used, mass, self.n,
                    piece.slots, slots, piece.first, piece.first_tile, self.tops.shape[-1],
                    seen_row, HEADS=self.heads, GROUP=self.group, TILE=piece.block_n, BLOCK=256,
                )  # fmt: skip
                continue
            groups = power_of_two(piece.k.groups)
            block_m = max(16 // groups, min(64, _MOST_ROWS // groups))
            weigh.weigh[(-(-piece.slots // piece.block_n), pairs)](
                piece.q, piece.k.plane, piece.k.scale, piece.k.zero,
                piece.position, self.q_position, self.bounds, piece.segment.used,
                self.options.slopes, self.bias, lse, seen, mass,
                *piece.q.stride()[:3], *piece.k.strides(piece.shared),
                *self._position_strides(piece), *self._query_rows(),
                0 if piece.shared else 1, self.n, *self.of_bias, piece.slots, piece.before, slots,
                piece.first, seen_row, float(self.options.scale),
                float(self.options.softcap or 1.0), *self._limits(), BLOCK_M=block_m,
                PEAK=self.options.peak, **self._shape(piece), num_warps=4, num_stages=2,
            )  # fmt: skip
        return mass


def coded_tile(k: Coded, v: Coded, mass: bool) -> tuple[int, int]:
    """Slots in a tile, and programs per multiprocessor, for keys and values that are codes.
    Measured on an H100.

    With the mass, kernels over 8-bit codes need so many registers that only three programs fit a
    multiprocessor; two waves of them are used.
    """
    # Expanded codes take a register each.
    widest = max(
        x.width if x.planes[0] else x.plane.shape[3] * x.plane.element_size() for x in (k, v)
    )
    bytewise = widest >= max(k.width, v.width)
    if mass:
        return 64, 6 if bytewise else 4
    return max(64, min(128, power_of_two(_CODED_TILE // widest))), 4


def warps(k: Coded, v: Coded, block_m: int) -> int:
    """Warps of a program that attends with `block_m` queries at a time. Multiplying queries by the
    scales of each tile, and expanding codes of two planes, need the registers of more threads."""
    expanded = k.planes[0] or v.planes[0]
    few = k.block == 1 and not expanded and block_m * power_of_two(k.groups) <= 64
    return 4 if few else 8


def _along_width(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _in_words(plane: Tensor, width: int) -> tuple[Tensor, int]:
    """A plane of 8-bit integers viewed as 16-bit words, which tensor cores can load directly, if
    strides allow it; and the number of elements per word (at most four), of `width` per token."""
    each = width // plane.shape[3]
    places = (plane.storage_offset(), *plane.stride()[:3], plane.shape[3])
    if each == 4 or any(x % 2 for x in places):
        return plane, each
    return plane.view(torch.int16), 2 * each


def kernel_type(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language as tl

    return {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }[dtype]
