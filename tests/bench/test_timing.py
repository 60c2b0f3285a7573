"""How calls are timed: turns, and a device's events by a device that is made up."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from kvkeep_lab.bench import timing
from kvkeep_lab.bench.timing import Events, captured, interleaved, on_host, timer_for

CPU = torch.device("cpu")


class Device:
    """What `torch.cuda` is to the timer: a host that launches, and a device some way behind."""

    def __init__(self):
        self.host = self.device = 0.0
        self.slept = []

    def launch(self, host, device):
        """A kernel: seconds of the host to launch it, and of the device to run it."""
        self.host += host
        self.device = max(self.host, self.device) + device

    def synchronize(self):
        self.host = max(self.host, self.device)

    def _sleep(self, cycles):
        self.slept.append(cycles)
        self.launch(0, cycles * 1e-9)

    def Event(self, enable_timing):  # noqa: N802
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, cuda):
        self.cuda, self.at = cuda, None

    def record(self):
        self.at = max(self.cuda.host, self.cuda.device)

    def query(self):
        return self.at <= self.cuda.host

    def synchronize(self):
        self.cuda.host = max(self.cuda.host, self.at)

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def launches(cuda, count, host=10e-6, device=2e-6):
    def call():
        for _ in range(count):
            cuda.launch(host, device)

    return call


def test_as_called_the_launches_count():
    cuda = Device()
    timer = Events(CPU, caches=8, cuda=cuda)
    cuda.launch(0, 1.0)  # what ran before does not
    assert timer(launches(cuda, 3)) == pytest.approx(32e-6)
    assert not cuda.slept


def test_queued_only_the_device_counts():
    cuda = Device()
    timer = Events(CPU, queued=True, caches=8, cuda=cuda)
    assert timer(launches(cuda, 3)) == pytest.approx(6e-6)
    assert timer(launches(cuda, 3)) == pytest.approx(6e-6)
    assert cuda.slept == [1 << 17] * 2


def test_a_slow_host_gets_more_time():
    cuda = Device()
    timer = Events(CPU, queued=True, caches=8, cuda=cuda)
    times = [timer(launches(cuda, 50)) for _ in range(4)]
    assert times[0] > 200e-6
    assert times[-1] == pytest.approx(100e-6)
    slowest = launches(cuda, 1, host=1.0)
    for _ in range(10):
        timer(slowest)
    assert cuda.slept[-1] == 1 << 24


@pytest.mark.parametrize("queued", [False, True])
def test_the_caches_are_written_before_each_call(queued):
    timer = Events(CPU, queued=queued, caches=8, cuda=Device())
    for _ in range(2):
        found = []
        timer(lambda: found.append(timer._scratch.tolist()))  # noqa: B023
        assert found == [[1] * 8]
        timer._scratch.zero_()


def test_systems_take_turns_and_the_first_does_not_count():
    order = []
    seconds = iter(range(100))

    def timer(call):
        call()
        return float(next(seconds))

    systems = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = interleaved(systems, turns=2, burst=2, timer=timer)
    assert "".join(order) == "aabb" * 3
    assert found == {"a": [4.0, 5.0, 8.0, 9.0], "b": [6.0, 7.0, 10.0, 11.0]}


def test_the_host_times_what_is_not_on_cuda():
    assert timer_for(CPU) is on_host
    assert timer_for(CPU, queued=True) is on_host
    assert 0 < on_host(lambda: sum(range(1000))) < 10


def test_a_captured_call_is_made_before_and_lives_as_long(monkeypatch):
    happened = []

    @contextmanager
    def within(what):
        happened.append(f"begin {what}")
        yield
        happened.append(f"end {what}")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: happened.append("replay"))
    cuda = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda it: within("aside"),
        CUDAGraph=lambda: graph,
        graph=lambda it: within("capture"),
    )
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    replay = captured(lambda: happened.append("call"))
    replay()
    assert happened == [
        *("begin aside", "call", "call", "call", "end aside"),
        *("begin capture", "call", "end capture", "replay"),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_device():
    device = torch.device("cuda")
    x = torch.randn(1 << 26, device=device)
    calls = {"one": lambda: x.mul_(1.0), "four": lambda: [x.mul_(1.0) for _ in range(4)]}
    for queued in (False, True):
        timer = timer_for(device, queued=queued)
        found = interleaved(calls, turns=3, burst=3, timer=timer)
        assert 3 < timing.median_ratio(found["four"], found["one"]) < 5
    replays = {name: captured(call) for name, call in calls.items()}
    found = interleaved(replays, turns=3, burst=3, timer=timer)
    assert 3 < timing.median_ratio(found["four"], found["one"]) < 5
