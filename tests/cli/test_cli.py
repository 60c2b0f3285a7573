"""The command line, as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import finetune_inputs
from support.command_line import last_line, run
from support.demo_stand_in import stand_in

import kvkeep
from kvkeep import native_library
from kvkeep.errors import UnsupportedError
from kvkeep.hf import compile_ahead
from kvkeep.hf.models import load
from kvkeep.hf.quantised import quantise
from kvkeep.home import home

MODEL = ("--model", "smollm2-135m")


@pytest.fixture(scope="module")
def _model(smollm2):
    """The model is fetched."""


@pytest.mark.usefixtures("_model")
def test_generate_streams_and_says_what_it_cost():
    result = run("generate", "What is the capital of France?", *MODEL, "--max-new-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout == "The capital of France is Paris.\n"
    cost = result.stderr.splitlines()[-1]
    for word in ("tokens/s", "first token after", "MiB", "slots", "keep_all+plain@growing"):
        assert word in cost


@pytest.mark.usefixtures("_model")
def test_generate_json():
    options = ("--cache", "window:16,sinks=2@fixed", "--max-new-tokens", "8", "--json")
    ran = run("generate", "-", *MODEL, *options, input="Tell me of the sea.")
    assert "answering ..." in ran.stderr  # a bar on a terminal
    result = last_line(ran)
    assert result["tokens"] == 8
    assert result["length"] == result["capacity"] == 18
    assert result["cache_bytes"] == result["allocated_bytes"] == 30 * 18 * (2 * 3 * 64 * 4 + 4)
    assert result["tokens_per_s"] > 0
    assert result["ttft_s"] > 0
    assert isinstance(result["text"], str)


@pytest.mark.usefixtures("_model")
def test_sampling_repeats_with_a_seed(tmp_path, monkeypatch, stand_in_home):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Write a line about rain.")
    options = ("--temperature", "0.9", "--seed", "7", "--max-new-tokens", "8", "--json")
    more = ("--system", "You are a poet.", "--prefill-chunk", "8")
    texts = [
        last_line(run("generate", "--prompt-file", str(prompt), *MODEL, *options, *extra))["text"]
        for extra in (more, more, ("--raw",))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hello", "--cache", "windw:3"), "did you mean 'window'"),
        (("hello", "--model", "smollm2"), "did you mean 'smollm2-135m'"),
        (("hello", "--dtype", "float23"), "no dtype 'float23'"),
        (("hello", "--device", "abacus"), "no device 'abacus'"),
        ((), "give a prompt"),
        (("hello", "--prompt-file", "x"), "does not exist"),
        (("hello", "--max-new-tokens", "0"), "--max-new-tokens"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_generate_keeps_the_beginning_of_a_prompt(base):
    """Of a chat, which the template begins with 6 tokens; each character is one."""
    prompt = "Be kind. " + "Who built the tower? " * 4
    options = (prompt, "--model", str(base), "--max-new-tokens", "8", "--json", "--cache")
    marked = last_line(run("generate", *options, "h2o:40", "--keep-until", "kind."))
    explicit, without = (
        last_line(run("generate", *options, spec)) for spec in ("h2o:40,keep_to=14", "h2o:40")
    )
    assert marked["text"] == explicit["text"] != without["text"]
    assert marked["length"] == without["length"] == 40
    assert marked["cache"] == explicit["cache"] != without["cache"]
    refused = run("generate", *options, "h2o:40", "--keep-until", "cruel.")
    assert refused.exit_code == 2
    assert "'cruel.' is not in the prompt of" in refused.stderr


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_generate_quantises_weights(tmp_path, monkeypatch, weights):
    pytest.importorskip("torchao")
    finetune_inputs.model(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2
    ).save_pretrained(tmp_path)
    finetune_inputs.tokenizer().save_pretrained(tmp_path)
    made = []

    def noted(model, kind):
        made.append((kind, quantise(model, kind)))

    monkeypatch.setattr("kvkeep.hf.models.quantise", noted)
    options = ("--model", tmp_path, "--max-new-tokens", "4", "--json", "--weights")
    assert last_line(run("generate", "Who?", *options, weights))["tokens"] == 4
    ((kind, layers),) = made
    assert kind == weights
    assert layers >= 14  # seven in each of two blocks
    refused = run("generate", "Who?", *options, "int3")
    assert refused.exit_code == 2
    assert "give one of int8, int4" in refused.stderr


def test_a_directory_without_a_model(tmp_path):
    result = run("generate", "hello", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "no config.json" in result.stderr
    (tmp_path / "config.json").write_text("{}")
    result = run("generate", "hello", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot load" in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = run("generate", "hello", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "no tokenizer" in result.stderr


def test_a_prompt_that_is_not_text(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"caf\xe9")
    for result in (
        run("generate", "--prompt-file", str(prompt)),
        run("generate", "-", input=b"caf\xe9"),
    ):
        assert result.exit_code == 2
        assert "not UTF-8" in result.stderr


def test_an_unexpected_error_is_one_line_unless_asked(monkeypatch):
    def fail(*_, **__):
        raise IndexError("index out of\nrange")

    monkeypatch.setattr("kvkeep.hf.models.load", fail)
    result = run("generate", "hello")
    assert result.exit_code == 1
    line = "error: IndexError: index out of range (--debug shows the traceback)"
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stderr
    for arguments in (("--debug", "generate", "hello"), ("generate", "hello", "--debug")):
        told = run(*arguments)
        assert told.exit_code == 1
        assert "Traceback" in told.stderr
        assert told.stderr.splitlines()[-1] == line
    assert "Traceback" in run("generate", "hello", "--cache", "windw:3", "--debug").stderr


def test_version():
    assert run("--version").stdout.startswith("kvkeep 0.")
    command = [sys.executable, "-m", "kvkeep", "--version"]
    assert b"kvkeep 0." in subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.usefixtures("_model")
def test_models():
    models = last_line(run("models", "list", "--json"))["models"]
    assert [model["name"] for model in models] == ["gemma3-270m", "smollm2-135m"]
    assert models[1]["fetched"] is True
    assert models[1]["path"] == str(home() / "models" / "smollm2-135m")
    assert last_line(run("models", "--json"))["models"] == models
    assert "smollm2-135m" in run("models").stdout
    assert last_line(run("models", "fetch", "smollm2-135m", "--json"))["path"].startswith(
        str(home())
    )


def test_models_of_any_name(base, tmp_path, monkeypatch):
    assert last_line(run("models", "fetch", str(base), "--json"))["path"] == str(base)
    shown = run("models", "show", str(base), "--cache", "h2o:16").stdout
    for said in ("llama (LlamaForCausalLM)", "by kvkeep", "h2o:16+plain@growing", "bytes a token"):
        assert said in shown
    assert last_line(run("models", "show", str(base), "--json"))["context"] == 256
    asked = []
    monkeypatch.setattr("kvkeep.hf.models.download", lambda name, _: asked.append(name) or base)
    assert run("models", "fetch", "owner/name").stdout == f"{base}\n"
    assert asked == ["owner/name"]
    for name, says in (
        ("gpt-9", "known: gemma3-270m, smollm2-135m"),
        (f"{base}s", f"did you mean '{base}'?"),
    ):
        for command in ("fetch", "show"):
            result = run("models", command, name)
            assert result.exit_code == 2
            assert says in result.stderr


def test_doctor():
    report = last_line(run("doctor", "--json"))
    assert [b["backend"] for b in report["backends"]] == ["native", "triton", "sdpa", "reference"]
    assert report["threads"] >= 1
    assert "reference" in run("doctor").stdout


@pytest.mark.parametrize(("idle", "warned"), [(8, False), (1, True)])
def test_doctor_says_that_the_machine_is_busy(idle, warned, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("kvkeep.threads.advised", lambda most: min(most, idle))
    assert ("generation uses 1 threads now" in run("doctor").stdout) == warned


@pytest.mark.parametrize("size", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_export(tmp_path, monkeypatch, size):
    if size == "tiny":
        monkeypatch.setenv("KVKEEP_HOME", stand_in(tmp_path)["KVKEEP_HOME"])
    path = tmp_path / "a.pt2"
    spec = "window:64,sinks=4+int8@fixed"
    result = last_line(run("export", str(path), *MODEL, "--cache", spec, "--json"))
    assert result["bytes"] == path.stat().st_size
    program = kvkeep.Program.load(path)
    model, tokenizer = load("smollm2-135m", "float32", "cpu")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    found, logits = [], program(ids)
    for _ in range(8):
        found.append(logits.argmax(dim=-1, keepdim=True))
        logits = program(found[-1])
    with kvkeep.attach(model, spec):
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(torch.cat(found, dim=1)[0]) == tokenizer.decode(
        expected[0, ids.shape[1] :]
    )


@pytest.mark.slow
@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
def test_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", stand_in(tmp_path, num_hidden_layers=1)["KVKEEP_HOME"])
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path / "steps"))
    result = last_line(run("compile", "--json"))
    assert [Path(file).exists() for file in result["files"]] == [True]
    model, _ = load("smollm2-135m", "auto", "cpu")
    with kvkeep.attach(model) as attachment:
        assert attachment.compiled
    monkeypatch.setenv("KVKEEP_STEPS", "")
    assert "KVKEEP_STEPS" in run("compile").stderr


@pytest.mark.slow  # compiles a program; hf/test_saved_steps.py has when it pays
def test_steps_are_compiled_when_that_pays(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", stand_in(tmp_path, num_hidden_layers=1)["KVKEEP_HOME"])
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path / "steps"))
    monkeypatch.setattr(compile_ahead, "PAYS_AFTER", 12)
    asked = ("generate", "--raw", "--max-new-tokens", "4", "Once")
    counted = []
    for _ in range(3):
        assert "compiled decode steps" not in run(*asked, "--no-compile").stderr
        counted += [int(file.read_text()) for file in (tmp_path / "steps").glob("*.tokens")]
    assert counted == [4, 8, 12]
    assert "compiled decode steps" in run(*asked).stderr
    assert len([*(tmp_path / "steps").glob("*.pt2")]) == 1
    assert "compiled decode steps" not in run(*asked).stderr
    (file,) = last_line(run("compile", "--json"))["files"]
    assert Path(file).parent == tmp_path / "steps"
    assert len([*(tmp_path / "steps").glob("*.pt2")]) == 1
    monkeypatch.setenv("KVKEEP_STEPS", "")
    assert "KVKEEP_STEPS" in run("compile").stderr


def test_export_refuses():
    for path, cache, message in (
        ("a.bin", "keep_all@fixed", "names that end in .pt2"),
        ("a.pt2", "keep_most", "no policy 'keep_most'"),
    ):
        result = run("export", path, *MODEL, "--cache", cache)
        assert result.exit_code == 2
        assert message in result.output


def test_steps_that_cannot_be_compiled_are_tried_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", stand_in(tmp_path, num_hidden_layers=1)["KVKEEP_HOME"])
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path / "steps"))
    monkeypatch.setattr(compile_ahead, "PAYS_AFTER", 1)

    def fails(*given):
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(compile_ahead, "compile_steps", fails)
    asked = ("generate", "--raw", "--max-new-tokens", "4", "Once")
    assert "not compiled, now or later: no compiler" in run(*asked).stderr
    assert "compiled" not in run(*asked).stderr
