"""The examples run, and find what they computed before."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    """How many tokens were found of each prompt of an example."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(map(int, n)) for n in re.findall(r"\[(\d+) of (\d+) tokens found", done.stdout)]


def test_all_are_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"chat", "retrieval", "agent", "alora"}


def test_chat(tmp_path):
    first = run("chat", tmp_path / "store")
    assert first[0][0] == 0
    for (_, before), (found, _) in pairwise(first):
        assert found > before
    second = run("chat", tmp_path / "store")
    assert all(found >= tokens - 32 for found, tokens in second)


@pytest.mark.parametrize("name", ["retrieval", "agent"])
def test_blocks(name):
    (first, _), *later = run(name)
    assert first < 20 or name == "agent"
    assert later[-1][0] > 0.5 * later[-1][1]
