"""A run that was interrupted ends as if it had not been, or says why it cannot."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import finetune_inputs
from support.process_group import execute, start
from torch.multiprocessing import ProcessExitedException

from kvkeep.files import tensor_file
from kvkeep.finetune import checkpoint
from kvkeep.finetune.checkpoint import CheckpointError, Checkpoints
from kvkeep.finetune.lora import Lora
from kvkeep.finetune.options import Options
from kvkeep.finetune.run import finetune

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
OPTIONS = {
    "cache": "h2o:16",
    "length": 24,
    "batch": 1,
    "accumulate": 2,
    "rank": 4,
    "targets": "q_proj,v_proj,down_proj",
    "dropout": 0.2,
    "lr": 1e-2,
    "warmup": 1,
    "decay": "cosine",
    "steps": STEPS,
    "eval_every": 2,
    "save_every": 2,
}
FILES = ("adapter_model.safetensors", "adapter_config.json")

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from support import finetune_inputs
import test_checkpoint
from kvkeep.files import tensor_file

whole, saved = tensor_file.write, []

def killed(path, *content, **how):
    saved.append(path)
    whole(path, *content, **how)
    if len(saved) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

tensor_file.write = killed
test_checkpoint.run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    return finetune_inputs.write(file, *finetune_inputs.texts())


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run from the beginning to the end, and what it said."""
    out, threads = tmp_path_factory.mktemp("whole") / "out", torch.get_num_threads()
    torch.set_num_threads(1)
    result = run(data, out)
    torch.set_num_threads(threads)
    return out, result


def run(data, out, resume=False, model=None, stop=None, said=None, **options):
    """A run, which ends early when it says something that begins with `stop`."""

    def progress(doing, share):
        if said is not None:
            said.append(doing)
        if stop is not None and doing.startswith(stop):
            raise KeyboardInterrupt

    given = Options(**{**OPTIONS, **options})
    return finetune(
        finetune_inputs.model() if model is None else model,
        finetune_inputs.tokenizer(),
        data,
        out,
        given,
        resume=resume,
        progress=progress,
    )


def stopped(data, out, stop="step 5/", **options):
    with pytest.raises(KeyboardInterrupt):
        run(data, out, stop=stop, **options)


def checkpoints(out):
    return sorted(path.name for path in out.iterdir())


def same(result, other):
    """The figures of two runs, except for time and place."""
    beside = {"seconds", "out"}
    return {k: v for k, v in result.items() if k not in beside} == {
        k: v for k, v in other.items() if k not in beside
    }


def test_an_interrupted_run_gives_the_same_weights(data, tmp_path, whole):
    expected, figures = whole
    stopped(data, tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    torch.rand(7)
    said = []
    result = run(data, tmp_path, resume=True, said=said)
    assert said[0] == "resuming after step 4"
    assert not any(doing.startswith("step 4/") for doing in said)
    assert same(result, figures)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (expected / name).read_bytes()
    last = f"checkpoint-{STEPS}/optimizer.safetensors"
    assert (tmp_path / last).read_bytes() == (expected / last).read_bytes()


def test_a_run_that_is_killed_while_it_writes_a_checkpoint(data, tmp_path, whole):
    expected, figures = whole
    here = Path(__file__).parent
    with pytest.raises(ProcessExitedException) as ended:
        start(execute, 1, KILLED, [str(data), str(tmp_path)], [str(here), str(here.parent)])
    assert ended.value.signal_name == "SIGKILL"
    partial, first = checkpoints(tmp_path)
    assert first == "checkpoint-2"
    assert (tmp_path / partial / "optimizer.safetensors").exists()
    result = run(data, tmp_path, resume=True)
    assert same(result, figures)
    assert checkpoints(tmp_path) == sorted([*FILES, "checkpoint-4", "checkpoint-6"])
    assert (tmp_path / FILES[0]).read_bytes() == (expected / FILES[0]).read_bytes()


def test_a_module_that_is_never_used(data, tmp_path):
    def model():
        found = finetune_inputs.model()
        found.model.spare = torch.nn.Linear(4, 4)
        torch.nn.init.zeros_(found.model.spare.weight)
        torch.nn.init.zeros_(found.model.spare.bias)
        return found

    options = {"steps": 3, "eval_every": 0, "targets": "q_proj,spare"}
    run(data, tmp_path / "whole", model=model(), **options)
    stopped(data, tmp_path / "out", stop="step 3/", model=model(), **options)
    run(data, tmp_path / "out", resume=True, model=model(), **options)
    found = [(tmp_path / place / FILES[0]).read_bytes() for place in ("whole", "out")]
    assert found[0] == found[1]


def test_the_newest_are_kept(data, tmp_path, whole):
    assert checkpoints(whole[0]) == sorted([*FILES, "checkpoint-4", "checkpoint-6"])
    options = {"steps": 3, "eval_every": 0, "accumulate": 1}
    run(data, tmp_path / "one", keep=1, save_every=1, **options)
    assert checkpoints(tmp_path / "one") == sorted([*FILES, "checkpoint-3"])
    run(data, tmp_path / "all", keep=3, save_every=1, **options)
    held = ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert checkpoints(tmp_path / "all") == sorted([*FILES, *held])
    run(data, tmp_path / "end", save_every=0, **options)
    assert checkpoints(tmp_path / "end") == sorted([*FILES, "checkpoint-3"])


def test_a_run_that_is_over_only_says_so(data, tmp_path):
    first = run(data, tmp_path, steps=2)
    (tmp_path / FILES[1]).unlink()  # as if it had been killed just then
    said = []
    assert same(run(data, tmp_path, resume=True, steps=2, said=said), first)
    assert said == ["resuming after step 2"]
    assert (tmp_path / FILES[1]).exists()


def test_resume_begins_where_there_is_nothing(data, tmp_path):
    stopped(data, tmp_path, stop="step 1/")
    assert checkpoints(tmp_path) == []
    assert run(data, tmp_path / "new", resume=True, steps=2)["steps"] == 2


def test_a_run_is_not_written_over(data, tmp_path):
    run(data, tmp_path, steps=2)
    with pytest.raises(
        CheckpointError, match=r"already holds a run \(checkpoint-2\); resume it with --res"
    ):
        run(data, tmp_path, steps=2)
    (tmp_path / "checkpoint-2").rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"already holds a run \(adapter_model.safetensors\)"):
        run(data, tmp_path, steps=2)
    with pytest.raises(CheckpointError, match="the adapter of a run but no checkpoint"):
        run(data, tmp_path, steps=2, resume=True)


def test_what_may_not_change(data, tmp_path):
    stopped(data, tmp_path, stop="step 3/")
    for options, says in (
        ({"lr": 2e-2}, "lr is 0.02, was 0.01;"),
        ({"steps": 7, "seed": 1}, "seed is 1, was 0; steps is 7, was 6;"),
        ({"cache": "h2o:17"}, r"cache is h2o:17\+plain@growing, was h2o:16.*; chunk is 17, was 16"),
        (
            {"model": finetune_inputs.model(rms_norm_eps=1e-3)},
            r"model: config\.rms_norm_eps was 1e-06, is 0\.001; model: modules differ;",
        ),
    ):
        with pytest.raises(CheckpointError, match=f"another run: {says}"):
            run(data, tmp_path, resume=True, **options)
    model = finetune_inputs.model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match="another run: model: weights differ;"):
        run(data, tmp_path, resume=True, model=model)
    lines = data.read_bytes().splitlines()
    for changed, says in (
        ([*lines[1:3], lines[0], *lines[3:]], "data is"),
        ([*lines[:-1], lines[0]], "evaluation is"),
    ):
        (tmp_path / "other").write_bytes(b"\n".join(changed))
        with pytest.raises(CheckpointError, match=f"another run: {says}"):
            run(tmp_path / "other", tmp_path, resume=True)


def test_what_may_change(data, tmp_path, whole):
    stopped(data, tmp_path, stop="step 3/")
    changed = {"keep": 1, "save_every": 3, "eval_every": 1, "host_bytes": 0}
    run(data, tmp_path, resume=True, **changed)
    assert (tmp_path / FILES[0]).read_bytes() == (whole[0] / FILES[0]).read_bytes()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    found = bytearray(path.read_bytes())
    found[-9] ^= 1
    path.write_bytes(found)


def reseal(path):
    """Make a checkpoint believe in a file."""
    file = path.parent / checkpoint.CONTENTS
    fields = json.loads(file.read_bytes())
    fields["files"][path.name] = checkpoint._checksum(path)
    file.write_text(json.dumps(fields))


def change(**changed):
    def damage(path):
        path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))

    return damage


@pytest.fixture(scope="module")
def early(data, tmp_path_factory):
    """What a run left that was interrupted after four steps."""
    out = tmp_path_factory.mktemp("early")
    stopped(data, out)
    return out


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (FILES[0], truncate, "another checksum"),
        (FILES[1], flip, "another checksum"),
        ("optimizer.safetensors", truncate, "another checksum"),
        ("optimizer.safetensors", flip, "another checksum"),
        ("optimizer.safetensors", Path.unlink, "No such file"),
        (checkpoint.STATE, Path.unlink, "No such file"),
        (checkpoint.STATE, change(global_step=3), "another checksum"),
        (checkpoint.CONTENTS, Path.unlink, "No such file"),
        (checkpoint.CONTENTS, truncate, "damaged: "),
        (checkpoint.CONTENTS, lambda path: path.write_text("[]"), "damaged: "),
        (checkpoint.CONTENTS, lambda path: path.write_text("[" * 99999), "damaged: "),
        (checkpoint.CONTENTS, change(files=4), "files is 4"),
        (checkpoint.CONTENTS, change(step=2), "it is from step 2"),
        (checkpoint.CONTENTS, change(version=2), "format version 2, this kvkeep reads 3"),
    ],
)
def test_damage_is_named(data, early, tmp_path, name, damage, says):
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", early, out], check=True)
    damage(out / "checkpoint-4" / name)
    place = "" if "version" in says else f"/{name}"
    with pytest.raises(CheckpointError, match=f"checkpoint-4{place} is .*{says}"):
        run(data, out, resume=True)
    assert checkpoints(out) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    ("name", "tensors"),
    [(FILES[0], {"x": torch.zeros(1)}), ("optimizer.safetensors", {"x.step": torch.zeros(())})],
)
def test_a_checkpoint_of_something_else(data, early, tmp_path, name, tensors):
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", early, out], check=True)
    save_file(tensors, out / "checkpoint-4" / name)
    reseal(out / "checkpoint-4" / name)
    with pytest.raises(CheckpointError, match=f"checkpoint-4/{name} is damaged"):
        run(data, out, resume=True)


def test_without_a_damaged_checkpoint_the_one_before_it_serves(data, early, tmp_path, whole):
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", early, out], check=True)
    subprocess.run(["rm", "-r", out / "checkpoint-4"], check=True)
    run(data, out, resume=True)
    assert (out / FILES[0]).read_bytes() == (whole[0] / FILES[0]).read_bytes()


def test_nothing_is_pickled_or_unpickled(data, early, tmp_path, monkeypatch):
    files = {path.name for path in (early / "checkpoint-4").iterdir()}
    assert files == {*FILES, "optimizer.safetensors", "trainer_state.json", "kvkeep_finetune.json"}

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", early, out], check=True)
    assert run(data, out, resume=True)["steps"] == STEPS


def test_one_process_at_a_time(data, tmp_path):
    with (
        Checkpoints(tmp_path / "a" / "b", Lora(), {}, {}, 1, None).claimed(),
        pytest.raises(CheckpointError, match="another process is fine-tuning into"),
    ):
        run(data, tmp_path / "a" / "b", steps=2)
    assert run(data, tmp_path / "a" / "b", steps=2)["steps"] == 2
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file.*; give a directory"):
        run(data, tmp_path / "file", steps=2)


def test_a_disk_that_is_full(data, tmp_path, monkeypatch, whole):
    saved, write = [], tensor_file.write

    def full(path, *content, **how):
        saved.append(path)
        if len(saved) == 4:
            raise OSError(28, "No space left on device")
        write(path, *content, **how)

    monkeypatch.setattr(tensor_file, "write", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoint-4: .*No space left"):
        run(data, tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    monkeypatch.setattr(tensor_file, "write", write)
    said = []
    run(data, tmp_path, resume=True, said=said)
    assert said[0] == "resuming after step 2"
    assert (tmp_path / FILES[0]).read_bytes() == (whole[0] / FILES[0]).read_bytes()
