"""`kvkeep finetune`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from support import command_line, finetune_inputs
from support.command_line import last_line
from transformers import AutoModelForCausalLM

from kvkeep import train
from kvkeep.finetune.data import read
from kvkeep.hf.models import load

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())


def run(base, data, out, *options):
    where = ("--model", str(base), "--out", str(out), "--dtype", "float32", "--device", "cpu")
    return command_line.run("finetune", data, *where, *options)


def test_finetune(base, data, tmp_path):
    out = tmp_path / "deep" / "out"
    options = ("--cache", "h2o:16", "--length", "32", "--rank", "4", "--lr", "0.01")
    more = ("--batch", "2", "--steps", "3", "--eval-every", "2", "--save-every", "1")
    result = run(base, data, out, *options, *more, "--json")
    found = last_line(result)
    assert list(found) == [
        *("model", "cache", "steps", "tokens", "seconds", "train_loss", "eval_loss"),
        *("untuned_loss", "tuned_loss", "out"),
    ]
    assert (found["model"], found["cache"]) == (str(base), "h2o:16+plain@growing")
    assert (found["steps"], found["out"]) == (3, str(out))
    assert [one["step"] for one in found["train_loss"]] == [1, 2, 3]
    assert [one["step"] for one in found["eval_loss"]] == [2, 3]
    assert found["tuned_loss"] == found["eval_loss"][-1]["loss"]
    assert 3 * 4 <= found["tokens"] <= 3 * 2 * 32
    for said in ("step 1/3, loss ", " tokens/s", "evaluated after step 2", "going on"):
        assert (said in result.stderr) is (said != "going on")

    held = read(data, finetune_inputs.tokenizer())[-1]
    ids = held.ids[None, :32]
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, out).eval()
    adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), out / "checkpoint-3"
    )
    pieces = torch.split(held.ids, 32)
    total = sum(
        float(train.loss(model, x[None], x[None], cache="h2o:16", chunk=16)) * (len(x) - 1)
        for x in pieces
    ) / sum(len(x) - 1 for x in pieces)
    assert found["tuned_loss"] == pytest.approx(total, rel=1e-5)
    with torch.no_grad():
        assert model(ids).logits.equal(adapter.eval()(ids).logits)

    again = run(base, data, out, *options, *more)
    assert again.exit_code == 2
    assert "already holds a run (checkpoint-3); resume it with --resume" in again.stderr
    same = run(base, data, out, *options, *more, "--resume", "--json")
    assert last_line(same) == found
    assert "resuming after step 3" in same.stderr
    changed = run(base, data, out, *options, *more[:-2], "--resume", "--seed", "1")
    assert changed.exit_code == 2
    assert "seed is 1, was 0" in changed.stderr


def test_it_says_what_came_of_it(base, data, tmp_path):
    out = tmp_path / "out"
    options = ("--cache", "keep_all", "--length", "24", "--epochs", "1", "--rank", "2")
    result = run(base, data, out, *options, "--accumulate", "9", "--host-memory", "1MB")
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()[-1]
    assert said.startswith(f"{out}: 2 steps, ")
    for part in (" tokens, ", " s; loss ", " before, ", " after (keep_all+plain@growing)"):
        assert part in said
    alone = run(base, data, tmp_path / "alone", *options, "--accumulate", "9", "--holdout", "0")
    assert alone.exit_code == 0, alone.output
    assert "loss" not in alone.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cache", "windw:3"), "did you mean 'window'"),
        (("--model", "smollm2-135n"), "did you mean 'smollm2-135m'"),
        (("--steps", "1", "--epochs", "1"), "give one of them"),
        (("--decay", "fast"), "give linear or cosine"),
        (("--host-memory", "much"), "give a size such as"),
        (("--eval", "nowhere.jsonl"), "does not exist"),
        (("--chunk", "9-x"), "a chunk of '9-x'; give a number, or a range such as 256-1024"),
        (("--chunk", "9-8"), "least_chunk is 9, but chunks have at most 8"),
        (("--full", "--rank", "4"), "rank of LoRA, but all weights are trained"),
        (("--offload",), "nothing can be offloaded from the CPU"),
        (("--device", "nowhere"), "no device 'nowhere' here"),
        (("--length", "1"), "greater than or equal to 2"),
        (("--steps", "1", "--length", "999"), "the model holds 256"),
        (("--holdout", "6"), "use one of at most 5"),
    ],
)
def test_bad_input(base, data, tmp_path, options, says):
    result = run(base, data, tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_classes(base, tmp_path):
    data = finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.labelled())
    options = ("--task", "classify", "--cache", "h2o:16", "--holdout", "4", "--seed", "3")
    more = ("--steps", "2", "--rank", "4")
    result = run(base, data, tmp_path / "out", *options, *more, "--json")
    found = last_line(result)
    assert "evaluated after step 2, loss " in result.stderr
    assert f", accuracy {found['tuned_accuracy']:.1%}" in result.stderr
    torch.rand(1)
    again = run(base, data, tmp_path / "out", *options, *more, "--resume")
    assert "; accuracy " in again.stdout  # the head that is drawn is that of the first run
    model, _ = load(str(base), labels=["down", "up"])
    assert (model.config.id2label, model.config.pad_token_id) == ({0: "down", 1: "up"}, 0)
    PeftModel.from_pretrained(model, tmp_path / "out")

    whole = run(base, data, tmp_path / "whole", *options, "--steps", "1", "--full")
    assert whole.exit_code == 0, whole.output
    kept, _ = load(str(tmp_path / "whole"), labels=["some", "other", "names"])
    assert kept.config.id2label == {0: "down", 1: "up"}
    same = finetune_inputs.write(tmp_path / "same.jsonl", *finetune_inputs.labelled()[::2])
    refused = run(base, same, tmp_path / "c", *options)
    assert refused.exit_code == 2
    assert "all 6 texts have the label 'down'; give texts of at least two" in refused.stderr


def launch(base, data, out, *options):
    """Two processes."""
    where = ("--model", str(base), "--out", str(out), "--device", "cpu")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "kvkeep", "finetune", str(data), *where]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*command, *options], capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_torchrun(base, data, tmp_path):
    options = ("--full", "--cache", "h2o:16", "--chunk", "8-16", "--length", "32", "--steps", "2")
    more = ("--accumulate", "2", "--json")
    found = launch(base, data, tmp_path / "two", *options, *more)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("step 2/2, loss ") == 1
    (line,) = found.stdout.splitlines()
    once = last_line(run(base, data, tmp_path / "one", *options, *more))
    for name in ("untuned_loss", "tuned_loss"):
        assert json.loads(line)[name] == pytest.approx(once[name], rel=1e-4)
    assert once["tuned_loss"] < once["untuned_loss"] - 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "two")


@pytest.mark.slow
def test_torchrun_ends_all_processes_with_one_error(base, data, tmp_path):
    options = ("--full", "--cache", "h2o:16", "--steps", "3", "--accumulate", "2")
    for out, more, says in (
        ("a", ("--lr", "1e30", "--holdout", "0"), "error: step 2: the loss is nan in chunk 0"),
        ("b", ("--holdout", "9"), "error: a holdout of 9 documents"),
    ):
        found = launch(base, data, tmp_path / out, *options, *more)
        assert found.returncode != 0
        assert found.stderr.count("error: ") == 1
        assert says in found.stderr


def test_a_bad_line_is_named(base, tmp_path):
    data = finetune_inputs.write(tmp_path / "texts.jsonl", "Good.", b'{"text": 1}')
    result = run(base, data, tmp_path / "out")
    assert result.exit_code == 2
    assert f'{data}, line 2: "text" is 1; give text that is not empty' in result.stderr


def test_without_peft(base, data, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvkeep.finetune.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    result = run(base, data, tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install 'kvkeep[finetune]'" in " ".join(result.stderr.replace("│", " ").split())
