"""`kvkeep chat` and `kvkeep sessions`, as a user calls them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.cli.chat import _converse
from kvkeep.hf import session as module


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Sessions of the test's own."""
    monkeypatch.setattr(module, "home", lambda: tmp_path)


def run(*arguments, lines=()):
    typed = "".join(f"{x}\n" for x in lines).encode("utf-8", "surrogateescape")
    result = CliRunner().invoke(app, [*arguments], input=typed)
    assert result.exit_code == 0, result.output
    return result


def listed():
    return json.loads(run("sessions", "--json").stdout)["sessions"]


@pytest.mark.parametrize("size", ["small", pytest.param("real", marks=pytest.mark.slow)])
def test_chat(stand_in_home, monkeypatch, size):
    if size == "small":
        monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    brief = ("--max-new-tokens", "8")
    said = [
        "What is the capital of France?",
        "/stats",
        "/fork b",
        "And of Italy?",
        "/undo",
        "/help",
    ]
    first = run("chat", "--session", "a", "--cache", "h2o:64", *brief, lines=said)
    for text in ("[session a, context 0/8192]", "tokens kept", "now in session b", "/undo"):
        assert text in first.stderr
    assert "removed: And of Italy?" in first.stderr
    assert [(x["session"], x["turns"]) for x in listed()] == [("a", 1), ("b", 1)]
    assert listed()[0]["keeps"] == "h2o:64+plain@growing"

    answer = json.loads(run("sessions", "export", "b", "--json").stdout)[1]["content"]
    again = run("chat", "--session", "b", *brief, lines=["And of Spain?", "/nonsense", "", "/exit"])
    assert answer in again.stdout  # what was said before
    if size == "real":
        assert "Paris" in answer
        assert "Madrid" in again.stdout
    assert listed()[1]["turns"] == 2
    messages = json.loads(run("sessions", "export", "b", "--json").stdout)
    assert messages[1]["content"] == answer
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert "**user**\n\nAnd of Spain?" in run("sessions", "export", "b").stdout

    run("sessions", "delete", "a")
    assert [x["session"] for x in listed()] == ["b"]
    assert "b" in run("sessions").stdout


def test_bad_input(stand_in_home, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    assert "no sessions yet" in run("sessions").stdout
    for arguments, reason in (
        (("sessions", "delete", "a"), "no session 'a'"),
        (("sessions", "export", "a.kv"), "no session 'a.kv'"),
        (("chat", "--session", "../a"), "session name"),
        (("chat", "--cache", "h20:64"), "no policy 'h20'"),
    ):
        result = CliRunner().invoke(app, [*arguments], input="")
        assert result.exit_code == 2
        assert reason in result.stderr
    lines = ["h\udce9llo", "/undo", "/save", "/fork"]
    errors = run("chat", lines=lines).stderr
    reasons = ("the message is not UTF-8", "no turn to undo", "has no name", "session name ''")
    for reason in reasons:
        assert reason in errors
    run("chat", "--session", "a", "--max-new-tokens", "2", lines=["Hello."])
    result = CliRunner().invoke(app, ["chat", "--session", "a", "--cache", "window:9"], input="")
    assert result.exit_code == 2
    assert "leave out" in result.stderr


def test_closed_stdin_is_the_end_of_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    talk = SimpleNamespace(messages=[], name=None, context=(0, 9))
    _converse(talk, max_new_tokens=1, temperature=0.0, top_p=1.0)
    assert "context 0/9" in capsys.readouterr().err
