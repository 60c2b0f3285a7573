"""The attention operation alone, over keys and values of given lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment, View, attend, backends
from kvkeep.attention.centre import Centre, Turns
from kvkeep.codec import Codec, Plain, WithinKeys, encoded_count
from kvkeep.errors import SpecError
from kvkeep.host.placement import dtype_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.planes import POSITION, joined
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec
from kvkeep_lab.bench.device import (
    Limits,
    arithmetic,
    bandwidth,
    because,
    device_named,
    with_values,
)
from kvkeep_lab.bench.options import Op
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.rivals import OF_LATENTS, ON_CPU, RIVALS, torch_folded
from kvkeep_lab.bench.timing import Call, captured, interleaved, spread, timer_for
from kvkeep_lab.checks import require_known

_Row = dict[str, Any]


class _System(NamedTuple):
    backend: str
    codec: str
    mass: bool


class _Shape(NamedTuple):
    """A case: `new` queries of each of `heads` query heads. `latent`: the values are the first
    `latent` elements of the keys; 0: values are apart from keys."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    new: int
    latent: int = 0

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, for the tokens that each query sees."""
        seen = self.new * self.length - self.new * (self.new - 1) // 2
        return 2 * self.rows * self.heads * seen * (self.dim + (self.latent or self.dim))


def run(asked: Op, progress: Progress = silent) -> dict[str, Any]:
    """Time `attend` on every backend that can run, and the attention of other libraries.

    All codecs but "plain" are timed only on the device's own backend. Of "kivi" some tokens are
    plain, and lengths below a number of queries are left out for it. Keys of a codec with a centre
    have one, under a rotary embedding; those of "int4:centre=0" have none.

    Returns:
        `rows`: for each system and length, and for each number of `heads` and of `queries` if
        several are given, `median_us` as called, `spread_us` (width of the middle half), `error`
        (of the output, relative to torch's attention over the decoded keys and values),
        `gb_per_s`, the bytes of all encoded keys and values divided by the time, `gflop_per_s`, and
        `of_bound`, the time to read these bytes or to compute, whichever is longer, relative to the
        time. On CUDA also `graph_us`, the time to replay a CUDA graph, from which the figures are
        then computed; `of_copy`, `gb_per_s` relative to the device's copies; and `skipped`, the
        reason why a case was not measured. And of this machine, the better of before and after:
        `read_gb_per_s` or `copy_gb_per_s`, its memory's bandwidth, and `product_gflop_per_s`, the
        speed of its products of matrices.

    Raises:
        SpecError: a codec or a system to measure against does not exist, or a number of queries is
            not in 1 to the largest length.
        ModelError: the device does not exist here.
    """
    place, dtype, queries = device_named(asked.device), dtype_named(asked.dtype), asked.queries
    on_cpu, latent = place.type == "cpu", asked.latent or 0
    rows = asked.rows or (1 if on_cpu else 8)
    longest = (256, 2048, 8192, 32768) if on_cpu else (2048, 8192, 32768, 131072)
    lengths = asked.lengths or longest
    codecs = asked.codecs or ((Plain.name,) if on_cpu else (Plain.name, "int8", "int4", "fp8"))
    masses = (False,) if on_cpu else (False, True)
    if asked.mass is not None:
        masses = (asked.mass,)
    against = asked.against
    if against is None:
        against = OF_LATENTS if latent else ON_CPU if on_cpu else tuple(RIVALS)
    require_known("attention", against, RIVALS)
    for n in queries:
        if not 1 <= n <= max(lengths):
            raise SpecError(f"{n} queries; give 1 to {max(lengths)}, the most tokens held")
    specs = {codec: CacheSpec.parse(f"keep_all+{codec}") for codec in codecs}
    for codec, spec in specs.items() if latent else ():
        if spec.value_codec.for_values() != spec.key_codec.for_values():
            raise SpecError(
                f"codec {codec}: values within keys have the keys' codec; give "
                f"{spec.key_codec.name} alone"
            )
    systems = list(_systems(place, codecs, masses, against))
    limits, table = Limits(place, asked.seconds), list[_Row]()
    (name, rate), product_rate = bandwidth(place), arithmetic(place, dtype)
    cases = [
        _Shape(rows, heads, asked.kv_heads, length, asked.head_dim, n, latent)
        for length in lengths
        for heads in asked.heads
        for n in queries
        if n <= length
    ]
    work = Work(progress, sum(shape.length for shape in cases))
    with torch.inference_mode():
        for shape in cases:
            work.stage(f"{shape.new} of {shape.length} tokens", shape.length)
            case = _Case(limits, specs, systems, dtype)
            for system, row in case.measured(shape, asked.turns, work).items():
                about: _Row = {"backend": system.backend, "codec": system.codec}
                about["mass"] = system.mass if any(masses) else None
                about["heads"] = shape.heads if len(asked.heads) > 1 else None
                about["queries"] = shape.new if len(queries) > 1 else None
                table.append({**about, "length": shape.length, **row})
    rate = max(rate, bandwidth(place)[1])
    product_rate = max(product_rate, arithmetic(place, dtype))
    for row in table:
        if "median_us" in row:
            read = row["gb_per_s"] / rate
            row["of_copy"] = None if on_cpu else read
            row["of_bound"] = max(read, row["gflop_per_s"] / product_rate)
    sizes: dict[str, Any] = {"B": rows, "Hq": _listed(asked.heads), "H": asked.kv_heads}
    sizes |= {"D": asked.head_dim} | ({"latent": latent} if latent else {})
    shape_of = {"dtype": str(dtype).removeprefix("torch."), **sizes, "n": _listed(queries)}
    speeds = {name: rate, "product_gflop_per_s": product_rate}
    return result("op", with_values(table), shape=shape_of, **speeds)


def _figures(called: list[float], replayed: list[float] | None, size: int, operations: int) -> _Row:
    """The figures of calls and of their CUDA graphs, both in seconds."""
    median = statistics.median(called)
    graph = None if replayed is None else statistics.median(replayed)
    best = graph or median
    return {
        "median_us": median * 1e6,
        "spread_us": spread(called) * 1e6,
        "graph_us": graph and graph * 1e6,
        "gb_per_s": size / best / 1e9,
        "gflop_per_s": operations / best / 1e9,
    }


def _listed(numbers: Sequence[int]) -> int | str:
    return numbers[0] if len(numbers) == 1 else ", ".join(map(str, numbers))


def _systems(
    device: torch.device, codecs: Sequence[str], masses: Sequence[bool], against: Sequence[str]
) -> Iterator[_System]:
    """The systems to try on a device: its own backends, backends for any device with plain keys and
    values and without the mass, and other libraries. A system may still refuse the call."""
    for codec in codecs:
        for mass, backend in product(masses, backends()):
            own = backend.device == device.type
            portable = backend.device is None and codec == Plain.name and not mass
            usable = not backend.missing() or (own and device.type != "cpu")
            if backend.name != "reference" and usable and (own or portable):
                yield _System(backend.name, codec, mass)
        if codec == Plain.name:
            yield from (_System(name, codec, False) for name in against)


class _Case:
    """One length with its systems; `sizes` are the bytes of keys and values in each codec."""

    def __init__(
        self,
        limits: Limits,
        specs: Mapping[str, CacheSpec],
        systems: Sequence[_System],
        dtype: torch.dtype,
    ) -> None:
        self.device, self.limits, self.dtype = limits.device, limits, dtype
        self.specs = specs
        self.sizes: dict[str, int] = {}
        self.rows: dict[_System, _Row] = {system: {} for system in systems}

    def measured(self, shape: _Shape, turns: int, work: Work) -> dict[_System, _Row]:
        """The figures of each system at a shape."""
        # Keys and values as given, copied for other libraries, encoded, and during encoding.
        held = shape.rows * shape.kv_heads * shape.length * shape.dim
        case = partial(self._measure, shape, turns, work)
        _, reason = self.limits.attempt(case, 12 * held * self.dtype.itemsize)
        if reason is not None:
            self.rows = {system: {"skipped": reason} for system in self.rows}
        return self.rows

    def _measure(self, shape: _Shape, turns: int, work: Work) -> None:
        there: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        queries = (shape.rows, shape.heads, shape.new, shape.dim)
        held = (shape.rows, shape.kv_heads, shape.length, shape.dim)
        q, k = torch.randn(queries, **there), torch.randn(held, **there)
        v = k[..., : shape.latent] if shape.latent else torch.randn(held, **there)
        calls = self._calls(q, k, v)
        # Many calls of a fast operation for a stable median, few of a slow one.
        burst = max(2, min(20, 200_000 // (shape.length * shape.new)))
        timed = partial(interleaved, turns=turns, burst=burst)
        called = timed(calls, timer=timer_for(self.device), tick=work.part)
        replayed = timed(self._replays(calls), timer=timer_for(self.device, queued=True))
        for system, seconds in called.items():
            given = (seconds, replayed.get(system), self.sizes[system.codec], shape.operations)
            self.rows[system] = {**_figures(*given), **self.rows[system]}

    def _calls(self, q: Tensor, k: Tensor, v: Tensor) -> dict[_System, Call]:
        """The calls of all systems whose first call succeeded; records their errors."""
        calls: dict[_System, Call] = {}
        views: dict[str, View] = {}
        centres = {codec: _centre(spec, k) for codec, spec in self.specs.items()}
        reference: dict[str, Tensor] = {}
        for codec, spec in self.specs.items():
            views[codec] = view = _view(spec, k, v, q.shape[2])
            self.sizes[codec] = sum(
                plane.element_size() * plane.numel()
                for segment in view.segments
                for name, plane in segment.planes.items()
                if name != POSITION
            )
            held = view.in_order(q.dtype, q.dtype, moved=False, centre=centres[codec])
            reference[codec] = torch_folded(q, held.keys, held.values)()
        for system, row in self.rows.items():
            row["skipped"] = self.limits.refuse()
            try:
                if row["skipped"] is None:
                    call = _call(system, q, k, v, views[system.codec], centres[system.codec])
                    row["error"] = _difference(call(), reference[system.codec])
                    calls[system] = call
            except Exception as error:  # any error: the other systems are still measured
                row["skipped"] = because(error)
        return calls

    def _replays(self, calls: dict[_System, Call]) -> dict[_System, Call]:
        """CUDA graphs of the calls that can be captured."""
        replays: dict[_System, Call] = {}
        for system, call in calls.items() if self.device.type == "cuda" else ():
            try:
                replays[system] = captured(call)
            except Exception as error:
                self.rows[system]["skipped"] = f"in a CUDA graph: {because(error)}"
        return replays


def _call(
    system: _System, q: Tensor, k: Tensor, v: Tensor, view: View, centre: Centre | None
) -> Callable[[], Tensor]:
    name, options = system.backend, {"scale": q.shape[-1] ** -0.5, "need_mass": system.mass}
    if name in RIVALS:
        return RIVALS[name](q, k, v)
    return lambda: attend(q, view, backend=name, centre=centre, **options)[0]


def _centre(spec: CacheSpec, k: Tensor) -> Centre | None:
    """The centre of keys (B, H, S, D) that are coded as given; None: the codec has no centre."""
    if not spec.key_codec.centre:
        return None
    rows, heads, length, width = k.shape
    rotary = Rotary(10_000.0 ** (-torch.arange(width // 2) / (width // 2)))
    mean = torch.randn(rows, heads, width, device=k.device)
    return Centre.of_mean(mean, Turns.of(rotary, width, length, k.device))


def _difference(out: Tensor, reference: Tensor) -> float:
    out, reference = out.float(), reference.float()
    return float((out - reference).norm() / reference.norm())


def _view(spec: CacheSpec, k: Tensor, v: Tensor, n: int) -> View:
    """Keys and values as a layer holds them: of a codec that encodes blocks, the newest plain."""
    key, value, length = spec.key_codec, spec.value_codec.for_values(), k.shape[2]
    if v.shape[3] < k.shape[3]:
        key = key.for_latents()
        value = WithinKeys(key, v.shape[3])
    place = torch.arange(length, dtype=torch.int32, device=k.device)
    encoded = length if key.block == 1 else encoded_count(length - n, key, value)
    segments = []
    for tokens, codecs in ((slice(encoded), (key, value)), (slice(encoded, None), (Plain(),) * 2)):
        own = place[tokens].view(1, 1, -1).expand(k.shape[0], -1, -1)
        if own.shape[2]:
            segments.append(_segment(k[:, :, tokens], v[:, :, tokens], own, *codecs))
    return View(tuple(segments), place[-n:], ragged=False)


def _segment(k: Tensor, v: Tensor, position: Tensor, key: Codec, value: Codec) -> Segment:
    planes = joined(key.encode(k), "k") | joined(value.encode(v), "v")
    if key.block > 1:
        position = position.reshape(*position.shape[:2], -1, key.block)
    planes = {name: plane.contiguous() for name, plane in planes.items()}
    return Segment(planes | {POSITION: position}, key, value)
