"""How commands end: one line for each error, and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import typer
from support.command_line import run

from kvkeep.__main__ import _quiet
from kvkeep.cli.generate import given_prompt
from kvkeep.policy import POLICIES

READING = "reading stdin ...\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--nothing",), "error: No such option: --nothing; see `kvkeep --help`"),
        (("store", "gc"), "error: Missing argument 'STORE'; see `kvkeep store gc --help`"),
        (("genrate",), "No such command 'genrate'. Did you mean 'generate'? See `kvkeep --help`"),
        (("generate", "--seed", "x"), "'--seed': 'x' should be a valid integer"),
        (("generate", "--temperature", "-1"), "'-1' should be greater than or equal to 0; see"),
        (("serve", "--budget", "foo"), "error: --budget 'foo': give a size such as 500MB"),
        (("bench", "prefill", "--lengths", "0"), "error: --lengths '0': give whole numbers"),
        (("generate", "h\udce9llo"), "error: the prompt is not UTF-8 text: "),
        (("generate", "hi", "--system", "\udce9"), "error: --system is not UTF-8 text: "),
        (("generate", "hi", "--cache", "h20:9"), "error: no policy 'h20' in 'h20:9'; did you mean"),
        (("generate", "--model", "./smolm2-135m"), "no model './smolm2-135m'"),
        (("generate", "hi", "--cache", "kivi"), "kivi is a codec: write keep_all+kivi"),
        (("--import", "no.py", "doctor"), "'--import': file 'no.py' does not exist; see"),
        (("doctor", "--import", "/dev/null"), "error: --import /dev/null: not a Python file"),
        (("bench", "op", "--heads", "5"), "error: --heads 5 must be a multiple of --kv-heads 8"),
    ],
)
def test_bad_usage_is_one_line(arguments, line):
    result = run(*arguments, input="hi")
    assert result.exit_code == 2
    assert result.stdout == ""
    (said,) = result.stderr.removeprefix(READING).splitlines()
    assert said.startswith("error: ")
    assert line in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("eval", "--specs", ""), "no spec to evaluate"),
        (("export", "a.pt2", "--cache", "h2o:10"), "h2o:10+plain@growing cannot be exported"),
        (("export", "nowhere/a.pt2"), "nowhere/a.pt2 cannot be written: No such file or directory"),
        (("export", "directory.pt2"), "directory.pt2 is a directory"),
        (("finetune", "bad.jsonl", "--out", "out"), "bad.jsonl, line 2: not JSON"),
        (("finetune", "good.jsonl", "--out", "out", "--eval", "bad.jsonl"), "bad.jsonl, line 2"),
    ],
)
def test_checks_that_need_no_model_come_first(arguments, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory.pt2").mkdir()
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    result = run(*arguments, "--model", "./nowhere")
    assert result.exit_code == 2
    assert line in result.stderr


POLICY = """
from dataclasses import dataclass
from typing import ClassVar
from kvkeep.policy import POLICIES, Scored

@dataclass(frozen=True)
class Mine(Scored):
    name: ClassVar[str] = "mine"

    def score(self, planes, seen):
        return planes["score"]

POLICIES["mine"] = Mine
"""


@pytest.mark.parametrize("place", ["first", "last", "joined"])
def test_a_file_that_adds_a_policy(place, tmp_path):
    """The spec is known when the command reads it; the missing model comes after."""
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    command = ("generate", "hi", "--cache", "mine:8", "--model", "./nowhere")
    given = {
        "first": ("--import", str(file), *command),
        "last": (*command, "--import", str(file)),
        "joined": (*command, f"--import={file}"),
    }
    try:
        assert "no policy 'mine'" in run(*command).stderr
        assert "no model './nowhere'" in run(*given[place]).stderr
    finally:
        POLICIES.pop("mine", None)


def test_after_two_dashes_nothing_is_imported():
    """Nor of a prompt."""
    assert (
        "no model './nowhere'" in run("generate", "--model", "./nowhere", "--", "--import").stderr
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "1 / 0", "a.py: ZeroDivisionError: division by zero; correct the file"),
        ("a.py", "(", "a.py: SyntaxError: "),
        ("a.txt", "", "a.txt: not a Python file; its name must end in .py"),
    ],
)
def test_files_that_cannot_be_imported(name, text, message, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    result = run("--import", str(file), "doctor")
    assert result.exit_code == 2
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("error: --import ")
    assert message in said


def test_no_command_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr
    assert "error:" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (EOFError("x"), 1)]
)
def test_exit_codes(monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("kvkeep.hf.models.load", fail)
    result = run("generate", "hello")
    assert result.exit_code == code
    said = result.stderr.removeprefix(READING).strip()
    assert said == ("error: EOFError: x (--debug shows the traceback)" if code == 1 else "")


@pytest.mark.parametrize(
    ("argument", "stdin", "file", "prompt"),
    [
        ("Summarise:", "a text\n", None, "Summarise:\n\na text\n"),
        ("Summarise:", "", None, "Summarise:"),
        ("", "a text", None, "a text"),
        ("-", "a text", None, "a text"),
        ("Summarise:", "ignored", "of a file", "Summarise:\n\nof a file"),
        ("", "ignored", "of a file", "of a file"),
    ],
)
def test_prompts(argument, stdin, file, prompt, tmp_path, monkeypatch):
    piped, given = tmp_path / "stdin", None
    piped.write_text(stdin)
    if file is not None:
        given = tmp_path / "file"
        given.write_text(file)
    with piped.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert given_prompt(argument, given) == prompt


def test_a_device_is_not_read(monkeypatch):
    """Nor is a terminal: only a pipe or a file is."""
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert given_prompt("hello", None) == "hello"


def test_closed_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert given_prompt("hello", None) == "hello"
    with pytest.raises(typer.BadParameter, match="give a prompt"):
        given_prompt("-", None)


def test_of_warnings_only_kvkeeps_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvkeep"])
    monkeypatch.setattr(sys, "warnoptions", [])
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):  # which are restored afterwards
        monkeypatch.setenv(name, "info")
    with warnings.catch_warnings():
        _quiet()
        for module in ("kvkeep.codec.base", "kvkeepers", "transformers.x"):
            warnings.warn_explicit("of " + module, UserWarning, "file.py", 1, module=module)
    assert capsys.readouterr().err == "warning: of kvkeep.codec.base\n"


@pytest.fixture
def started(stand_in_home):
    """Starts a generation of its own process, whose output is a pipe."""
    command = [sys.executable, "-m", "kvkeep", "generate", "hello", "--max-new-tokens", "8000"]
    env = {**os.environ, "KVKEEP_HOME": stand_in_home, "PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, **options) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe(started):
    assert started.stdout.read(10)  # it streams
    started.stdout.close()
    assert started.wait(60) == 141
    said = started.stderr.read().decode()
    assert "Traceback" not in said
    assert "error" not in said.lower()


@pytest.mark.slow
def test_an_interrupt_leaves_the_text_so_far(started):
    begun = started.stdout.read(10)
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    rest = started.stdout.read()
    assert started.wait(60) == 130
    assert begun
    assert rest.endswith(b"\n")
    said = started.stderr.read()
    assert b"Traceback" not in said
    assert b"torchao" not in said  # transformers imports it where it is installed
