"""The attention operation alone, over keys and values of given lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Segment, View, attend, backends
from kvkeep.attention.centre import Centre, Turns
from kvkeep.codec import Codec, Plain, encoded_count
from kvkeep.errors import SpecError
from kvkeep.host.placement import dtype_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.planes import POSITION, joined
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec
from kvkeep_lab.bench.device import Limits, bandwidth, because, device_named, with_values
from kvkeep_lab.bench.options import Op
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.rivals import ON_CPU, RIVALS, torch_sdpa
from kvkeep_lab.bench.timing import Call, captured, interleaved, spread, timer_for
from kvkeep_lab.checks import require_known


class _System(NamedTuple):
    backend: str
    codec: str
    mass: bool


class _Found(NamedTuple):
    """Measurements of one system, in seconds; `skipped` is the reason if some are missing."""

    called: Sequence[float] = ()
    replayed: Sequence[float] = ()
    error: float | None = None
    skipped: str | None = None


def run(asked: Op, progress: Progress = silent) -> dict[str, Any]:
    """Time `attend` on every backend that can run, and the attention of other libraries.

    All codecs but "plain" are timed only on the device's own backend. Of "kivi" some tokens are
    plain, and lengths below a number of queries are left out for it. Keys of a codec with a centre
    have one, under a rotary embedding; those of "int4:centre=0" have none.

    Returns:
        `rows`: for each system and length, and for each number of `queries` if several are given,
        `median_us` as called, `spread_us` (width of the middle half), `error` (of the output,
        relative to torch's attention over the decoded keys and values), and `gb_per_s`, the bytes
        of all encoded keys and values divided by the time. On CUDA also `graph_us`, the time to
        replay a CUDA graph, from which `gb_per_s` is then computed; `of_copy`, `gb_per_s` relative
        to the device's copies; and `skipped`, the reason why a case was not measured. And
        `read_gb_per_s` or `copy_gb_per_s`: this machine's memory bandwidth, measured in this run.

    Raises:
        SpecError: a codec or a system to measure against does not exist, or a number of queries is
            not in 1 to the largest length.
        ModelError: the device does not exist here.
    """
    place, dtype, queries = device_named(asked.device), dtype_named(asked.dtype), asked.queries
    on_cpu = place.type == "cpu"
    rows = asked.rows or (1 if on_cpu else 8)
    longest = (256, 2048, 8192, 32768) if on_cpu else (2048, 8192, 32768, 131072)
    lengths = asked.lengths or longest
    codecs = asked.codecs or ((Plain.name,) if on_cpu else (Plain.name, "int8", "int4", "fp8"))
    masses = (False, True) if asked.both_masses or not on_cpu else (False,)
    if asked.mass is not None:
        masses = (asked.mass,)
    against = (ON_CPU if on_cpu else tuple(RIVALS)) if asked.against is None else asked.against
    require_known("attention", against, RIVALS)
    for n in queries:
        if not 1 <= n <= max(lengths):
            raise SpecError(f"{n} queries; give 1 to {max(lengths)}, the most tokens held")
    specs = {codec: CacheSpec.parse(f"keep_all+{codec}") for codec in codecs}
    systems = list(_systems(place, codecs, masses, against))
    limits, table, rates = Limits(place, asked.seconds), [], [bandwidth(place)]
    cases = [(n, length) for length in lengths for n in queries if n <= length]
    work = Work(progress, sum(length for _, length in cases))
    with torch.inference_mode():
        for new, length in cases:
            work.stage(f"{new} of {length} tokens", length)
            case = _Case(limits, specs, systems, dtype)
            shape = (rows, asked.heads, asked.kv_heads, length, asked.head_dim, new)
            measured = case.measured(shape, asked.turns, work)
            if any(found.called for found in measured.values()):
                rates.append(bandwidth(place))
            for system, found in measured.items():
                table.append(
                    {"backend": system.backend, "codec": system.codec}
                    | ({"mass": system.mass} if any(masses) else {})
                    | ({"queries": new} if len(queries) > 1 else {})
                    | {"length": length}
                    | _figures(found, case.sizes.get(system.codec, 0))
                )
    name, rate = rates[0][0], statistics.median(rate for _, rate in rates)
    for row in () if on_cpu else table:
        row["of_copy"] = row["gb_per_s"] and row["gb_per_s"] / rate
    sizes: dict[str, Any] = {"B": rows, "Hq": asked.heads, "H": asked.kv_heads, "D": asked.head_dim}
    sizes["n"] = queries[0] if len(queries) == 1 else ", ".join(map(str, queries))
    about = {"dtype": str(dtype).removeprefix("torch."), **sizes}
    return result("op", with_values(table), shape=about, **{name: rate})


def _figures(found: _Found, size: int) -> dict[str, Any]:
    called, replayed = (statistics.median(x) if x else None for x in (found.called, found.replayed))
    best = replayed or called
    return {
        "median_us": called and called * 1e6,
        "spread_us": spread(list(found.called)) * 1e6 if found.called else None,
        "graph_us": replayed and replayed * 1e6,
        "gb_per_s": best and size / best / 1e9,
        "of_copy": None,
        "error": found.error,
        "skipped": found.skipped,
    }


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
        self.specs, self.systems = specs, systems
        self.sizes: dict[str, int] = {}
        self._found: dict[_System, _Found] = {}

    def measured(self, shape: tuple[int, ...], turns: int, work: Work) -> dict[_System, _Found]:
        """The measurements of each system at a shape (B, Hq, H, S, D, n)."""
        rows, heads, kv_heads, length, dim, n = shape
        # Keys and values as given, copied for other libraries, encoded, and during encoding.
        reason = self.limits.refuse(12 * rows * kv_heads * length * dim * self.dtype.itemsize)
        try:
            if reason is None:
                self._measure((rows, heads, n, dim), (rows, kv_heads, length, dim), turns, work)
                return self._found
        except Exception as error:
            if self.device.type == "cpu":
                raise
            # After an error the device may be unusable: report it for the whole case and go on.
            reason = because(error)
        return {system: _Found(skipped=reason) for system in self.systems}

    def _measure(
        self, queries: tuple[int, ...], held: tuple[int, ...], turns: int, work: Work
    ) -> None:
        there: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        q, (k, v) = torch.randn(queries, **there), (torch.randn(held, **there) for _ in range(2))
        calls = self._calls(q, k, v)
        once = 1 if self.device.type == "cpu" else 0.5  # elsewhere graphs follow
        # Many calls of a fast operation for a stable median, few of a slow one.
        options = {"turns": turns, "burst": max(2, min(20, 200_000 // (held[2] * queries[2])))}

        def tick(share: float) -> None:
            work.part(once * share)

        called = interleaved(calls, timer=timer_for(self.device), tick=tick, **options)
        queued = timer_for(self.device, queued=True)
        replayed = interleaved(self._replays(calls), timer=queued, tick=tick, **options)
        for system, seconds in called.items():
            self._add(system, called=seconds, replayed=replayed.get(system, ()))

    def _add(self, system: _System, **found: Any) -> None:
        self._found[system] = self._found.get(system, _Found())._replace(**found)

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
            reference[codec] = torch_sdpa(q, held.keys, held.values)()
        for system in self.systems:
            reason = self.limits.refuse()
            try:
                if reason is None:
                    call = _call(system, q, k, v, views[system.codec], centres[system.codec])
                    self._add(system, error=_difference(call(), reference[system.codec]))
                    calls[system] = call
            except Exception as error:  # any error: the other systems are still measured
                reason = because(error)
            self._add(system, skipped=reason)
        return calls

    def _replays(self, calls: dict[_System, Call]) -> dict[_System, Call]:
        """CUDA graphs of the calls that can be captured."""
        replays: dict[_System, Call] = {}
        for system, call in calls.items() if self.device.type == "cuda" else ():
            try:
                replays[system] = captured(call)
            except Exception as error:
                self._add(system, skipped=f"in a CUDA graph: {because(error)}")
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
    return Centre(mean, Turns.of(rotary, width, length, k.device))


def _difference(out: Tensor, reference: Tensor) -> float:
    out, reference = out.float(), reference.float()
    return float((out - reference).norm() / reference.norm())


def _view(spec: CacheSpec, k: Tensor, v: Tensor, n: int) -> View:
    """Keys and values as a layer holds them: of a codec that encodes blocks, the newest plain."""
    key, value, length = spec.key_codec, spec.value_codec.for_values(), k.shape[2]
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
