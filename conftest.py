"""Runs every Python example in README.md and docs/ as a test: `pytest README.md docs`."""

from __future__ import annotations

from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def _setup(namespace: dict[str, Any]) -> None:
    from kvkeep.hf.models import resolve

    namespace["checkpoint"] = resolve("smollm2-135m")


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md"],
    setup=_setup,
).pytest()
