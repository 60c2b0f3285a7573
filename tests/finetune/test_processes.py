"""Several processes train as one does, and go on with each other's checkpoints."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support import finetune_inputs
from support.finetune_processes import run, tuned


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """As in the processes."""


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts(8))


def weights(out, name):
    return load_file(out / name)


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


def early(out, to):
    """What a run left that was interrupted after its second step."""
    shutil.copytree(out, to)
    shutil.rmtree(to / "checkpoint-4")
    for path in to.iterdir():
        if path.is_file():
            path.unlink()
    return to


KINDS = {
    "full": ({"full": True}, "model.safetensors"),
    "lora": ({"rank": 4, "dropout": 0.2}, "adapter_model.safetensors"),
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_they_train_as_one_does(data, tmp_path, size):
    once = {}
    jobs = []
    for kind, (options, _) in KINDS.items():
        if size == 4:
            options |= {"accumulate": 5}
        once[kind], _ = tuned(data, tmp_path / kind, **options)
        early(tmp_path / kind, tmp_path / f"{kind}-on")
        job = {"data": str(data), **options}
        jobs.append({"out": str(tmp_path / f"{kind}-all"), **job})
        jobs.append({"out": str(tmp_path / f"{kind}-on"), "resume": True, **job})
    results = run(size, jobs, tmp_path)
    for index, (kind, (options, file)) in enumerate(KINDS.items()):
        expected = weights(tmp_path / kind, file)
        for job in (2 * index, 2 * index + 1):
            for rank, found in enumerate(results):
                losses, said = found[job]
                assert losses == pytest.approx(once[kind], rel=1e-10)
                assert bool(said) is (rank == 0)
        for out in (f"{kind}-all", f"{kind}-on"):
            close(weights(tmp_path / out, file), expected)
        left = early(tmp_path / f"{kind}-all", tmp_path / f"{kind}-back")
        losses, said = tuned(data, left, resume=True, **options)
        assert said[0] == "resuming after step 2"
        assert losses == pytest.approx(once[kind], rel=1e-10)
        close(weights(left, file), expected)
        moments = "checkpoint-4/optimizer.safetensors"
        close(weights(left, moments), weights(tmp_path / kind, moments))
