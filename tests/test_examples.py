"""The examples run, and find what they computed before."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.demo_stand_in import stand_in

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.slow)])
def home(request, tmp_path_factory):
    """What is found does not depend on the model: where one lies, tiny or the real one."""
    tiny = request.param == "tiny"
    return (stand_in(tmp_path_factory.mktemp("home")) if tiny else os.environ).get("KVKEEP_HOME")


@pytest.fixture
def _model(home, monkeypatch):
    if home is not None:
        monkeypatch.setenv("KVKEEP_HOME", home)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a program: how many tokens were found of each of its prompts."""

    def run(name, *arguments):
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
        found = re.findall(r"\[(\d+) of (\d+) tokens found", capsys.readouterr().out)
        return [tuple(map(int, numbers)) for numbers in found]

    return run


def test_all_are_tried():
    names = {"chat", "retrieval", "agent", "alora", "handbook"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == names


@pytest.mark.usefixtures("_model")
def test_chat(run, tmp_path):
    first = run("chat", tmp_path / "store")
    assert first[0][0] == 0
    for (_, before), (found, _) in pairwise(first):
        assert found > before
    second = run("chat", tmp_path / "store")
    assert all(found >= tokens - 32 for found, tokens in second)


@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize("name", ["retrieval", "agent"])
def test_blocks(run, name):
    (first, _), *later = run(name)
    assert first < 20 or name == "agent"
    assert later[-1][0] > 0.5 * later[-1][1]


def test_handbook(run, tmp_path):
    pages = {f"page{i}.html": f"<p>Words of <em>page</em>  {i}.</p>" for i in range(20)}
    links = "".join(f'<a href="{name}">{name}</a>' for name in pages)
    (tmp_path / "index.html").write_text(links + '<a href="page0.html">again</a>')
    for name, body in pages.items():
        hidden = '<head><title>a title</title></head><p class="docnav"><a href="#">Next</a></p>'
        (tmp_path / name).write_text(f"<html>{hidden}<body>{body}<p>Prev</p></body></html>")
    run("handbook", tmp_path, "--html", tmp_path)
    train, held_out = (
        json.loads((tmp_path / f"{name}.jsonl").read_text())["text"].split("\n\n")
        for name in ("train", "held-out")
    )
    assert train + held_out == [f"Words of page {i}." for i in range(20)]
    assert len(held_out) == 2
