"""The attention operation alone, over keys and values of given lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Backend, Segment, View, attend, backends
from kvkeep.codec import Codec, Plain, encoded_count
from kvkeep.errors import SpecError
from kvkeep.host.placement import dtype_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.planes import POSITION, joined
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
    plain. Lengths below a number of queries are left out for it.

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
    limits, table, rates = Limits(place, asked.seconds), [], [bandwidth(place)]
    cases = [(n, length) for length in lengths for n in queries if n <= length]
    work = Work(progress, sum(length for _, length in cases))
    with torch.inference_mode():
        for n, length in cases:
            work.stage(f"{n} of {length} tokens", length)
            case = _Case(place, limits, specs, masses, against, dtype)
            shape = (rows, asked.heads, asked.kv_heads, length, asked.head_dim, n)
            measured = case.measured(shape, asked.turns, work)
            if any(found.called for found in measured.values()):
                rates.append(bandwidth(place))
            for system, found in measured.items():
                table.append(
                    {"backend": system.backend, "codec": system.codec}
                    | ({"mass": system.mass} if any(masses) else {})
                    | ({"queries": n} if len(queries) > 1 else {})
                    | {"length": length}
                    | _figures(found, case.sizes.get(system.codec, 0))
                )
    name, rate = rates[0][0], statistics.median(rate for _, rate in rates)
    if not on_cpu:
        for row in table:
            row["of_copy"] = row["gb_per_s"] and row["gb_per_s"] / rate
    sizes: dict[str, Any] = {"B": rows, "Hq": asked.heads, "H": asked.kv_heads}
    sizes["D"] = asked.head_dim
    sizes["n"] = queries[0] if len(queries) == 1 else ", ".join(map(str, queries))
    named = {"dtype": str(dtype).removeprefix("torch."), **sizes}
    return result("op", with_values(table), shape=named, **{name: rate})


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


class _Case:
    """One length with its systems; `sizes` are the bytes of keys and values in each codec."""

    def __init__(
        self,
        device: torch.device,
        limits: Limits,
        specs: dict[str, CacheSpec],
        masses: Sequence[bool],
        against: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        self.device, self.limits, self.dtype = device, limits, dtype
        self.specs, self.masses, self.against = specs, masses, against
        self.sizes: dict[str, int] = {}
        self._found: dict[_System, _Found] = {}

    def measured(self, shape: tuple[int, ...], turns: int, work: Work) -> dict[_System, _Found]:
        """The measurements of each system at a shape (B, Hq, H, S, D, n)."""
        try:
            self._measure(shape, turns, work)
        except Exception as error:
            if self.device.type == "cpu":
                raise
            # After an error the device may be unusable: report it for the whole case and go on.
            return {system: _Found(skipped=because(error)) for system in self._systems()}
        return self._found

    def _measure(self, shape: tuple[int, ...], turns: int, work: Work) -> None:
        rows, heads, kv_heads, length, dim, n = shape
        # Keys and values as given, copied for other libraries, encoded, and during encoding.
        given = 2 * rows * kv_heads * length * dim * self.dtype.itemsize
        if reason := self.limits.refuse(6 * given):
            self._found = {system: _Found(skipped=reason) for system in self._systems()}
            return
        there: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        q = torch.randn(rows, heads, n, dim, **there)
        k, v = (torch.randn(rows, kv_heads, length, dim, **there) for _ in range(2))
        calls = self._calls(q, k, v)
        # Many calls of a fast operation for a stable median, few of a slow one.
        burst = max(2, min(20, 200_000 // (length * n)))
        timer, queued = timer_for(self.device), timer_for(self.device, queued=True)
        once = 1 if self.device.type == "cpu" else 0.5  # elsewhere graphs follow

        def tick(share: float) -> None:
            work.part(once * share)

        called = interleaved(calls, turns=turns, burst=burst, timer=timer, tick=tick)
        replays = self._replays(calls)
        replayed = interleaved(replays, turns=turns, burst=burst, timer=queued, tick=tick)
        for system in calls:
            self._found[system] = self._found[system]._replace(
                called=called[system], replayed=replayed.get(system, ())
            )

    def _systems(self) -> list[_System]:
        systems = []
        for codec in self.specs:
            for mass in self.masses:
                names = [b.name for b in _measurable() if self._serves(b, codec, mass)]
                systems += [_System(name, codec, mass) for name in names]
            if codec == Plain.name:
                systems += [_System(name, codec, False) for name in self.against]
        return systems

    def _serves(self, backend: Backend, codec: str, mass: bool) -> bool:
        """Whether to try a backend; it may still refuse the call."""
        own = backend.device == self.device.type
        if backend.missing() and not (own and self.device.type != "cpu"):
            return False
        return own or (backend.device is None and codec == Plain.name and not mass)

    def _calls(self, q: Tensor, k: Tensor, v: Tensor) -> dict[_System, Call]:
        """The calls of all systems whose first call succeeded; records their errors."""
        calls: dict[_System, Call] = {}
        views: dict[str, View] = {}
        reference: dict[str, Tensor] = {}
        for codec, spec in self.specs.items():
            views[codec] = view = _view(spec, k, v, q.shape[2])
            self.sizes[codec] = sum(
                plane.element_size() * plane.numel()
                for segment in view.segments
                for name, plane in segment.planes.items()
                if name != POSITION
            )
            held = view.in_order(q.dtype, q.dtype, moved=False)
            reference[codec] = torch_sdpa(q, held.keys, held.values)()
        for system in self._systems():
            reason = self.limits.refuse()
            try:
                if reason is None:
                    call = self._call(system, q, k, v, views[system.codec])
                    error = _difference(call(), reference[system.codec])
                    calls[system] = call
                    self._found[system] = _Found(error=error)
                    continue
            except Exception as error:  # any error: the other systems are still measured
                reason = because(error)
            self._found[system] = _Found(skipped=reason)
        return calls

    def _call(
        self, system: _System, q: Tensor, k: Tensor, v: Tensor, view: View
    ) -> Callable[[], Tensor]:
        if system.backend in RIVALS:
            return RIVALS[system.backend](q, k, v)
        scale = q.shape[-1] ** -0.5
        name, mass = system.backend, system.mass
        return lambda: attend(q, view, scale=scale, backend=name, need_mass=mass)[0]

    def _replays(self, calls: dict[_System, Call]) -> dict[_System, Call]:
        """CUDA graphs of the calls that can be captured."""
        replays: dict[_System, Call] = {}
        for system, call in calls.items() if self.device.type == "cuda" else ():
            try:
                replays[system] = captured(call)
            except Exception as error:
                self._found[system] = self._found[system]._replace(
                    skipped=f"in a CUDA graph: {because(error)}"
                )
        return replays


def _measurable() -> list[Backend]:
    return [backend for backend in backends() if backend.name != "reference"]


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
