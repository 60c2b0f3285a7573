"""The time to append one token: concatenation against writing in place."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.host.progress import Progress, Work, silent
from kvkeep.layer.layer import LayerCache
from kvkeep.spec import CacheSpec
from kvkeep_lab.bench.device import Limits, device_named, with_values
from kvkeep_lab.bench.options import Append
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.timing import Timer, interleaved, median_ratio, timer_for

HEADS, DIM = 8, 128
LAYOUTS = ("concat", "growing", "fixed")
_BURST = 10


def run(asked: Append, progress: Progress = silent) -> dict[str, Any]:
    """Time one decode token on a layer that holds some tokens of 8 heads, 128 wide.

    Returns:
        `rows`, one per batch and entry of `tokens`: medians in microseconds, as called, of the
        update alone and of the whole step (update, attention, settle), and `update_ratio` and
        `step_ratio`, the medians of the paired ratios concat / growing. `growth_us` is the time of
        one growth of the growing storage, divided by the tokens until the next growth; `winner` is
        the layout with the fastest step, that share included. On CUDA also the device's own times
        (`..._device_us`, `device_winner`), and `skipped`, the reason why a case was not measured.

    Raises:
        ModelError: the device does not exist here.
    """
    place, turns = device_named(asked.device), asked.turns
    on_cpu = place.type == "cpu"
    tokens = asked.tokens or (
        (256, 1024, 2048, 4096) if on_cpu else (512, 2048, 8192, 32768, 131072)
    )
    batches = asked.batches or ((1,) if on_cpu else (1, 8, 32))
    layouts = asked.layouts or (LAYOUTS[:2] if on_cpu else LAYOUTS)
    limits, rows = Limits(place, asked.seconds), []
    work = Work(progress, sum(batches) * sum(tokens))
    with torch.inference_mode():
        for batch in batches:
            for held in tokens:
                several = f", {batch} rows" if batch > 1 else ""
                work.stage(f"{held} tokens{several}", batch * held)
                row = {"tokens": held} | ({"rows": batch} if len(batches) > 1 else {})
                rows.append(row | _Case(place, batch, held).row(layouts, turns, limits, work))
    dtype, heads = _like(place)
    sizes = {"Hq": heads, "H": HEADS, "D": DIM}
    rows_of = batches[0] if len(batches) == 1 else list(batches)
    named = {"dtype": str(dtype).removeprefix("torch."), "B": rows_of, **sizes}
    return result("append", with_values(rows), shape=named, turns=turns)


def _like(device: torch.device) -> tuple[torch.dtype, int]:
    """The dtype, and the number of query heads."""
    return (torch.float32, HEADS) if device.type == "cpu" else (torch.bfloat16, 4 * HEADS)


class _Case:
    """One batch size and length."""

    def __init__(self, device: torch.device, batch: int, held: int) -> None:
        self.device, self.batch, self.held = device, batch, held

    def row(self, layouts: Sequence[str], turns: int, limits: Limits, work: Work) -> dict[str, Any]:
        """The measurements, or the reason why the case was skipped."""
        slots = 2 * self.batch * self.held * HEADS * DIM * _like(self.device)[0].itemsize
        # Slots of each layout, spare slots, and the copies that concatenation and growth make.
        case = partial(self._figures, layouts, turns, work)
        found, skipped = limits.attempt(case, (len(layouts) + 2) * slots)
        return found or {"skipped": skipped}

    def _figures(self, layouts: Sequence[str], turns: int, work: Work) -> dict[str, Any]:
        row: dict[str, Any] = {}
        timers = {"": timer_for(self.device)}
        if self.device.type == "cuda":
            timers["_device"] = timer_for(self.device, queued=True)
        growth = self._growth(timers[""]) if "growing" in layouts else 0.0
        layers = {layout: self._filled(layout, turns) for layout in layouts}
        for what in ("update", "step"):
            for how, timer in timers.items():
                calls = {n: self._call(what, layer) for n, layer in layers.items()}
                found = interleaved(calls, turns=turns, burst=_BURST, timer=timer)
                work.part(1 / (2 * len(timers)))
                for layer in layers.values():
                    layer.crop(self.held - layer.fed)
                for name in layouts:
                    row[f"{name}_{what}{how}_us"] = statistics.median(found[name]) * 1e6
                if not how and {"concat", "growing"} <= set(layouts):
                    row[f"{what}_ratio"] = median_ratio(found["concat"], found["growing"])
        row["growth_us"] = growth * 1e6 if "growing" in layouts else None
        for how in timers:
            costs = {name: row[f"{name}_step{how}_us"] for name in layouts}
            if "growing" in costs:
                costs["growing"] += row["growth_us"]
            row[f"{how}_winner".lstrip("_")] = min(costs, key=costs.__getitem__)
        return row

    def _growth(self, timer: Timer) -> float:
        """Seconds of one growth, divided by the tokens for which it makes room."""
        shares = []
        for _ in range(3):
            layer = self._filled("growing", 0)
            spare = layer.stats().capacity - layer.length
            if spare:
                layer.extend(self._random(spare), self._random(spare))
                layer.settle()
            before = layer.stats().capacity
            took = timer(self._call("update", layer))
            shares.append(took / (layer.stats().capacity - before))
        return statistics.median(shares)

    def _filled(self, layout: str, turns: int) -> LayerCache:
        """A layer that holds `held` tokens; a fixed one has room for the measured steps."""
        room = (turns + 2) * _BURST
        layer = CacheSpec.parse(f"keep_all@{layout}").layer(capacity=self.held + room)
        layer.extend(self._random(self.held), self._random(self.held))
        layer.settle()
        return layer

    def _random(self, tokens: int, heads: int = HEADS) -> Tensor:
        shape = (self.batch, heads, tokens, DIM)
        return torch.randn(shape, dtype=_like(self.device)[0], device=self.device)

    def _call(self, what: str, layer: LayerCache) -> Callable[[], object]:
        q, k, v = self._random(1, _like(self.device)[1]), self._random(1), self._random(1)

        def update() -> None:
            layer.extend(k, v)
            layer.settle()

        return update if what == "update" else lambda: layer.step(q, k, v, scale=DIM**-0.5)
