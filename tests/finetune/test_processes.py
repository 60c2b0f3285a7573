"""Several processes train as one does, and go on with each other's checkpoints."""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import finetune_inputs
from support.finetune_processes import run, tuned
from torch.distributed.fsdp import CPUOffloadPolicy

import kvkeep.finetune.run
from kvkeep.finetune import processes
from kvkeep.finetune.processes import Processes

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(out, name):
    return load_file(out / name)


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


def early(out, to):
    """What a run left that was interrupted after its first step."""
    shutil.copytree(out, to)
    shutil.rmtree(to / "checkpoint-2")
    for path in to.iterdir():
        if path.is_file():
            path.unlink()
    return to


FULL = {"full": True}, "model.safetensors"
LORA = {"rank": 4, "dropout": 0.2}, "adapter_model.safetensors"


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Texts, and what one process makes of them: by kind its directory and losses."""
    place, threads = tmp_path_factory.mktemp("once"), torch.get_num_threads()
    torch.set_num_threads(1)
    data = finetune_inputs.write(place / "texts.jsonl", *finetune_inputs.texts(8))
    found = {}
    for name, (options, _) in (("full", FULL), ("lora", LORA)):
        found[name] = place / name, tuned(data, place / name, **options)[0]
    torch.set_num_threads(threads)
    return str(data), found


FAULTS = {
    "no loss": (1, "step 1: the loss is nan"),
    "no file": (1, "cannot read .*texts.jsonl: No such file"),
    "no room": (0, "cannot write .*checkpoint-1: .*No space left on device; make room"),
}
"""The process that fails, and the error with which all of them end."""


def test_two_train_as_one_does(once, tmp_path):
    data, alone = once
    jobs = []
    for name, (options, _) in (("full", FULL), ("lora", LORA)):
        early(alone[name][0], tmp_path / f"{name}-on")
        job = {"data": data, **options}
        jobs.append({"out": str(tmp_path / f"{name}-all"), **job})
        jobs.append({"out": str(tmp_path / f"{name}-on"), "resume": True, **job})
    lines = finetune_inputs.write(tmp_path / "labels.jsonl", *finetune_inputs.labelled())
    classes = {"data": str(lines), "full": True, "task": "classify", "length": 60}
    alone["classes"] = tmp_path / "classes-1", tuned(out=tmp_path / "classes-1", **classes)[0]
    jobs.append({"out": str(tmp_path / "classes-2"), **classes})
    shared = {"out": str(tmp_path / "shared"), "context_parallel": 2, "data": data, **LORA[0]}
    faulty = [
        {"out": str(tmp_path / fault), "data": data, "fault": fault, "full": fault == "no room"}
        for fault in FAULTS
    ]
    jobs += [shared, *faulty]
    for job, results in zip(jobs, zip(*run(2, jobs, tmp_path), strict=True), strict=True):
        if job in faulty:
            failing, says = FAULTS[job["fault"]]
            for rank, found in enumerate(results):
                assert re.search(says, found)
                assert found.startswith("PeerError") is (rank != failing)
            continue
        name = "classes" if "task" in job else "full" if job.get("full") else "lora"
        for rank, (losses, said) in enumerate(results):
            assert losses == pytest.approx(alone[name][1], rel=1e-10)
            assert bool(said) is (rank == 0)
        file = LORA[1] if name == "lora" else FULL[1]
        close(weights(Path(job["out"]), file), weights(alone[name][0], file))
    assert not list(tmp_path.glob("no room/*"))
    for name, (options, file) in (("full", FULL), ("lora", LORA)):
        left = early(tmp_path / f"{name}-all", tmp_path / f"{name}-back")
        losses, said = tuned(data, left, resume=True, **options)
        assert said[0] == "resuming after step 1"
        assert losses == pytest.approx(alone[name][1], rel=1e-10)
        close(weights(left, file), weights(alone[name][0], file))
        moments = "checkpoint-2/optimizer.safetensors"
        close(weights(left, moments), weights(alone[name][0], moments))


@pytest.mark.parametrize(("name", "kind"), [("full", FULL), ("lora", LORA)])
def test_one_process_with_its_shards_in_host_memory(once, tmp_path, monkeypatch, name, kind):
    """All of --offload but the copies to an accelerator, which is not there."""
    data, alone = once

    def here(device, options):
        found = Processes(device, replace(options, offload=False))
        found._offload = options.offload
        return found

    monkeypatch.setattr(kvkeep.finetune.run, "Processes", here)
    unpinned = functools.partial(CPUOffloadPolicy, pin_memory=False)
    monkeypatch.setattr(processes, "CPUOffloadPolicy", unpinned)
    early(alone[name][0], tmp_path / "out")
    with processes.launched(torch.device("cpu"), offload=True):
        losses, _ = tuned(data, tmp_path / "out", resume=True, offload=True, **kind[0])
    assert not torch.distributed.is_initialized()
    assert losses == pytest.approx(alone[name][1], rel=1e-10)
    close(weights(tmp_path / "out", kind[1]), weights(alone[name][0], kind[1]))


@pytest.mark.slow
def test_four_train_as_one_does(once, tmp_path):
    """Three batches would leave one idle: two share each text. And a step of as many batches."""
    data, alone = once
    more = {"data": data, "accumulate": 4, "full": True}
    expected, _ = tuned(out=tmp_path / "one", **more)
    early(alone["full"][0], tmp_path / "on")
    jobs = [
        {"out": str(tmp_path / "shared"), "context_parallel": 2, "data": data, "full": True},
        {
            "out": str(tmp_path / "on"),
            "resume": True,
            "context_parallel": 2,
            "data": data,
            **FULL[0],
        },
        {"out": str(tmp_path / "all"), **more},
        {"out": str(tmp_path / "few"), "data": data},
        {"out": str(tmp_path / "odd"), "data": data, "context_parallel": 3},
    ]
    shared, resumed, every, few, odd = run(4, jobs, tmp_path)[3]
    assert shared[0] == pytest.approx(alone["full"][1], rel=1e-10)
    assert resumed[0] == pytest.approx(alone["full"][1], rel=1e-10)
    assert every[0] == pytest.approx(expected, rel=1e-10)
    assert "4 processes with texts of their own, but a step has 3 batches" in few
    assert "3 processes for each text, but there are 4" in odd
    for out in ("shared", "on"):
        close(weights(tmp_path / out, FULL[1]), weights(alone["full"][0], FULL[1]))
    close(weights(tmp_path / "all", FULL[1]), weights(tmp_path / "one", FULL[1]))
