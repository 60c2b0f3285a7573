"""Runs every Python example in README.md and docs/ as a test: `pytest README.md docs`."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.sybil import SybilCollection

# Nothing that imports Triton: tests/conftest.py sets how Triton runs first.
_TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))
_HUB_NAME = Path("HuggingFaceTB/SmolLM2-135M-Instruct")


def _in_a_directory_with_the_model(namespace: dict[str, Any]) -> None:
    """A directory with the demo model under the name of its hub repository, so that README's
    example finds it there and asks no hub."""
    from kvkeep.hf.models import resolve

    directory = TemporaryDirectory()
    namespace["_left"] = (os.getcwd(), directory)
    link = Path(directory.name, _HUB_NAME)
    link.parent.mkdir()
    link.symlink_to(resolve("smollm2-135m"))
    os.chdir(directory.name)


def _back(namespace: dict[str, Any]) -> None:
    before, directory = namespace["_left"]
    os.chdir(before)
    directory.cleanup()


pytest_collect_file = SybilCollection(
    [
        Sybil(
            parsers=[PythonCodeBlockParser()],
            patterns=["README.md"],
            setup=_in_a_directory_with_the_model,
            teardown=_back,
        ),
        Sybil(
            parsers=[PythonCodeBlockParser()],
            patterns=["docs/*.md"],
            # Mellea 0.8 needs an older transformers; `make test-versions` runs its examples.
            # tests/evals/test_press.py runs those of evaluation.md, which import slowly.
            excludes=["docs/evaluation.md", *["docs/mellea.md"] * (_TRANSFORMERS >= (5, 24))],
        ),
    ]
).pytest()
