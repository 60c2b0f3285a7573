"""The number of threads follows the load of other processes, and is given back."""

from __future__ import annotations

import os
from math import inf

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep import threads
from kvkeep.generate import Batch, SamplingParams
from kvkeep.threads import Governor, Load, following_load, read_load, read_quota


class Machine:
    """A machine of some cores, of which others use a part; this process uses one core."""

    def __init__(self, cores=2):
        self.count, self.now, self.busy = cores, 0.0, 0.0
        self.quota = inf
        self.governor = Governor(self.read, lambda: self.now)

    def read(self):
        return Load(self.now, self.busy + self.now, self.now, self.count, self.quota)

    def passes(self, others, seconds=0.2):
        """Time passes in which others use so many cores."""
        self.now += seconds
        self.busy += others * seconds
        return self.governor.threads(self.count)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_core_is_given_up_and_taken_back():
    machine = Machine()
    assert machine.passes(0.0) == 2
    assert machine.passes(0.3) == 2
    assert machine.passes(0.5) == 1
    assert machine.passes(0.3) == 1  # no change to and fro
    assert machine.passes(0.1) == 2
    assert machine.passes(2.0) == 1  # one thread at least
    assert machine.passes(1.3) == 1
    assert machine.passes(0.0, seconds=0.1) == 1  # too short to tell
    assert machine.passes(0.0, seconds=0.1) == 2


@pytest.mark.parametrize(("others", "expected"), [(0.2, 8), (1.0, 7), (2.4, 5), (3.3, 5), (8.0, 1)])
def test_many_cores(others, expected):
    assert Machine(8).passes(others) == expected


def test_generations_of_a_process_share_the_cores():
    machine = Machine(8)
    machine.governor.count(2)
    assert machine.passes(0.0) == 4
    assert machine.passes(2.0) == 3
    machine.governor.count(-1)
    assert machine.passes(2.0) == 6


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/one", {"pod/cpu.max": "200000 100000", "pod/one/cpu.max": "max 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, inf),
        ("0::/", {}, inf),
        (
            "9:memory:/a\n4:cpu,cpuacct:/docker/1\n0::/",
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, inf),
    ],
)
def test_the_limit_of_a_container(tmp_path, lines, files, expected):
    own = tmp_path / "cgroup"
    own.write_text(lines + "\n")
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert read_quota(tmp_path / "mount", own) == expected


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (2.0, 2), (2.9, 2), (16.0, 7)])
def test_no_more_threads_than_the_limit_lets_run(quota, expected):
    machine = Machine(8)
    machine.quota = quota
    assert machine.passes(0.5) == expected


def test_a_system_that_does_not_tell():
    assert Governor(lambda: None).threads(2) == 2


def fails(adapt, governor):
    """A generation that raises."""
    assert torch.get_num_threads() == 2
    adapt()
    assert torch.get_num_threads() == 1
    with following_load(governor) as inner:  # as of a draft model
        inner()
    assert torch.get_num_threads() == 1
    assert governor._running == 1
    raise ZeroDivisionError


def test_threads_are_given_back():
    machine = Machine()
    machine.passes(1.0)
    with pytest.raises(ZeroDivisionError), following_load(machine.governor) as adapt:
        fails(adapt, machine.governor)
    assert torch.get_num_threads() == 2
    assert machine.governor._running == 0


def test_what_the_user_sets_meanwhile_counts():
    machine = Machine(8)
    with following_load(machine.governor) as adapt:
        torch.set_num_threads(3)
        machine.passes(0.0)
        adapt()
        assert torch.get_num_threads() == 3
        machine.passes(6.0)
        adapt()
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("way", ["environment", "deterministic"])
def test_it_can_be_turned_off(monkeypatch, way):
    if way == "environment":
        monkeypatch.setenv(threads.OFF, "fixed")
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    machine = Machine()
    machine.passes(1.0)
    with following_load(machine.governor) as adapt:
        adapt()
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("way", ["generate", "batch"])
def test_steps_of_a_generation_use_fewer_threads(monkeypatch, way):
    machine, used = Machine(), []
    machine.passes(1.0)
    monkeypatch.setattr(threads, "_governor", machine.governor)
    model = tiny("llama")
    kvkeep.attach(model, compile=False)
    model.model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    ids = torch.tensor([[5, 6, 7]])
    if way == "generate":
        model.generate(ids, max_new_tokens=4, eos_token_id=None)
    else:
        batch = Batch(model)
        batch.add(ids[0].tolist(), SamplingParams(max_new_tokens=4, end_tokens=frozenset()))
        list(batch)
    assert used == [1] * 4
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the load is read on Linux only")
def test_the_load_is_read():
    first = read_load()
    sum(range(3_000_000))
    second = read_load()
    assert second.at > first.at
    assert second.busy >= first.busy > 0
    assert second.own > first.own
