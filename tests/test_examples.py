"""The examples run, and find what they computed before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.demo_stand_in import stand_in

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """What is found does not depend on the model: the environment of one, tiny or the real one."""
    return stand_in(tmp_path_factory.mktemp("home")) if request.param == "tiny" else os.environ


def run(name, *arguments, env=os.environ):
    """How many tokens were found of each prompt of an example."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    return [tuple(map(int, n)) for n in re.findall(r"\[(\d+) of (\d+) tokens found", done.stdout)]


def test_all_are_tried():
    names = {"chat", "retrieval", "agent", "alora", "handbook"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == names


def test_chat(model, tmp_path):
    first = run("chat", tmp_path / "store", env=model)
    assert first[0][0] == 0
    for (_, before), (found, _) in pairwise(first):
        assert found > before
    second = run("chat", tmp_path / "store", env=model)
    assert all(found >= tokens - 32 for found, tokens in second)


@pytest.mark.parametrize("name", ["retrieval", "agent"])
def test_blocks(model, name):
    (first, _), *later = run(name, env=model)
    assert first < 20 or name == "agent"
    assert later[-1][0] > 0.5 * later[-1][1]


def test_handbook(tmp_path):
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
