"""What commands print fits terminals of 80 and of 60 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kvkeep_lab.cli.eval import _columns
from support.store_places import put
from typer.testing import CliRunner

from kvkeep.cli.app import app
from kvkeep.cli.output import print_table, say
from kvkeep.hf import session
from kvkeep.store import Disk

RECORDED = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.json"))
LONG = "full_attention=keep_all+kivi@growing;sliding_attention=window:512,sinks=4+int8@growing"


@pytest.fixture(params=[60, pytest.param(80, marks=pytest.mark.slow)])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def require_fits(text, width, *, words=()):
    assert text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    printed = text.split()
    assert [word for word in words if word not in printed] == []


def test_recorded_results(width, capsys):
    tables = 0
    for path in RECORDED:
        rows = json.loads(path.read_text().splitlines()[-1]).get("rows")
        if "tasks" in (rows or [{}])[0]:
            tasks = list(dict.fromkeys(task for row in rows for task in row["tasks"]))
            rows = [_columns(row, tasks) for row in rows]
        if not rows or any(row.keys() != rows[0].keys() for row in rows):
            continue  # of a script, which prints no table
        print_table("Answers of 64 tokens, smollm2-135m, bfloat16, on a machine of few cores", rows)
        headings = {word for key in rows[0] for word in key.replace("_", " ").split()}
        require_fits(capsys.readouterr().out, width, words=headings)
        tables += 1
    assert tables > 25


def test_lists(width, tmp_path, monkeypatch, stand_in_home):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # lines are not broken in files
    put(Disk(tmp_path / "store"), list(range(20)), identity="another text")
    saved = session.SessionInfo(
        "a-session-of-the-longest-name-" + "x" * 34, "m", "", LONG, [], 9, 9
    )
    monkeypatch.setattr(session, "sessions", lambda: [saved])
    for arguments in (
        ("doctor",),
        ("models",),
        ("models", "show", "smollm2-135m", "--cache", LONG.partition(";")[0].partition("=")[2]),
        ("sessions",),
        ("store", "ls", str(tmp_path / "store")),
        ("store", "stats", str(tmp_path / "store")),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        require_fits(re.sub(r"\x1b\[[0-9;]*m", "", result.stdout), width)


def test_inspect(width, monkeypatch, stand_in_home):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    result = CliRunner().invoke(app, ["inspect", "--context", "90", "--cache", "h2o:30"])
    assert result.exit_code == 0, result.output
    require_fits(result.stdout, width)


def test_lines_end_between_words_on_a_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes a file for a terminal
    said = f"30 tokens, 31.2 tokens/s, first token after 0.31 s; cache 9.2 MiB, 9/9 slots ({LONG})"
    say(said)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > 1
    assert "".join(lines).replace(" ", "") == said.replace(" ", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    say(said)
    assert capsys.readouterr().out == f"{said}\n"


def test_colours_are_off_unless_forced(monkeypatch, stand_in_home):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = ("inspect", "One two three four five six", "--cache", "h2o:4,recent=2")

    def shown(**env):
        result = CliRunner().invoke(app, options, env=env)
        assert result.exit_code == 0, result.output
        return result.stdout

    for env in ({}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}):
        plain = shown(**env)
        assert "\x1b[38" not in plain
        assert "·" in plain
        assert "dots are tokens" in " ".join(plain.split())
    bright = shown(FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm")
    assert "\x1b[38;2;" in bright
    assert "·" not in bright
