"""The help of every command: its examples, its width, and what it imports."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from kvkeep.cli.app import app


def commands(command, path=()):
    """Every command with its path, groups included."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, sub in command.commands.items():
            yield from commands(sub, (*path, name))


ROOT = typer.main.get_command(app)
ALL = list(commands(ROOT))
NAMES = [" ".join(path) or "kvkeep" for path, _ in ALL]


def examples_of(command):
    return [line.strip() for line in (command.epilog or "").splitlines()[2:]]


def parsed(args):
    """The path of the command that takes the arguments, which it parses."""
    context, path, command = ROOT.make_context("kvkeep", list(args)), (), ROOT
    while isinstance(command, TyperGroup) and (context._protected_args or context.args):
        given = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, given)
        path = (*path, name)
        context = command.make_context(name, rest, parent=context)
    return path


@pytest.mark.parametrize(("path", "command"), ALL, ids=NAMES)
def test_examples_are_calls_of_their_command(path, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = examples_of(command)
    assert examples
    for example in examples:
        assert len(example) <= 76  # a line of the help
        call = example.partition(" > ")[0].partition(" < ")[0].rpartition("| ")[2]
        program, *args = shlex.split(call)
        assert program == "kvkeep"
        for one in args:
            if Path(one).suffix in (".txt", ".json", ".jsonl"):  # files that must exist
                (tmp_path / one).touch()
        assert parsed(args)[: len(path)] == path


@pytest.mark.parametrize("width", [80, 60])
def test_help_fits_a_terminal(width):
    for path, command in ALL:
        name = " ".join(("kvkeep", *path))
        shown = command.get_help(typer.Context(command, info_name=name, terminal_width=width))
        assert "…" not in shown
        assert "..." not in shown.partition("Commands:")[2]
        lines = shown.splitlines()
        examples = [f"    {one}" for one in examples_of(command)]
        assert lines[-len(examples) :] == examples  # each on a line of its own
        assert max(map(len, lines[: -len(examples)])) <= width


def test_help_imports_neither_torch_nor_transformers():
    """Either takes seconds."""
    code = (
        "import sys; from typer.testing import CliRunner; from kvkeep.cli.app import app\n"
        f"for path in {[path for path, _ in ALL]!r}:\n"
        "    assert CliRunner().invoke(app, [*path, '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
