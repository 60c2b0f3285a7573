"""Run the tests of model libraries, and the documents' examples, with several versions.

Each pair of versions of torch and transformers gets an environment in build/versions; the pinned
pair has .venv. Prints a table, for docs/transformers.md; pytest's output stays in build/versions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from kvkeep.native_library import _path
from kvkeep.version import TESTED

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "versions"
TESTS = ("tests/hf", "tests/litgpt", "tests/mellea", "README.md", "docs")
PAGE = "tests/hf/test_sweep.py::test_the_page_names_every_type_and_none_that_is_wrong"
LITGPT = re.search(r"^LITGPT := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

# What torch and transformers decide the versions of.
FOLLOWERS = ("torch", "triton", "transformers", "tokenizers", "huggingface_hub", "peft", "trl")


def oldest(name: str) -> str:
    """The least version that kvkeep admits, as a requirement."""
    return name + TESTED[name].split(",")[0].replace(">=", "==")


PAIRS = {"oldest": [*map(oldest, TESTED)], "pinned": [], "newest": [*TESTED]}


def installed(name: str, pair: list[str]) -> Path:
    """The Python of an environment with a pair of versions."""
    if not pair:
        return ROOT / ".venv" / "bin" / "python"
    place = PLACE / name
    python, done = place / "bin" / "python", place / "installed"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    rest = PLACE / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    rest.write_text("\n".join(x for x in lines if x.split("==")[0] not in FOLLOWERS))
    pip = [python, "-m", "pip", "install", "-q"]
    torch = [x for x in pair if x.startswith("torch")]
    subprocess.run([*pip, *torch], check=True)  # first, so that nothing else chooses one
    kept = ["-c", rest, "-C", "wheel.cmake=false", *pair]
    subprocess.run([*pip, *kept, "-e", f"{ROOT}[dev]", "-e", f"{ROOT / 'lab'}[plot]"], check=True)
    assert LITGPT is not None
    subprocess.run([*pip, "-c", rest, "--no-deps", *LITGPT[1].split()], check=True)
    done.touch()
    return python


def version_of(python: Path, name: str) -> str:
    """The version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def tested(name: str, python: Path, tests: list[str]) -> dict[str, str]:
    """Run the tests in an environment: a row of the table."""
    report, log = PLACE / f"{name}.xml", PLACE / f"{name}.log"
    # The examples of a document go on from each other; the page names the versions of its sweep.
    command = [python, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "4"]
    command += ["--dist", "loadfile", "--deselect", PAGE]
    native = {"KVKEEP_NATIVE": str(_path())}  # one build serves all versions of torch
    with log.open("w") as file:
        subprocess.run(
            [*command, f"--junit-xml={report}", *tests],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | native,
        )
    suite = ElementTree.parse(report).getroot()[0]
    number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return {
        "": name,
        "transformers": version_of(python, "transformers"),
        "torch": version_of(python, "torch").split("+")[0],
        "passed": str(number["tests"] - failed - number["skipped"]),
        "skipped": str(number["skipped"]),
        "failed": str(failed),
    }


def main() -> int:
    """Print the table; returns the number of tests that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="of: %(default)s")
    parser.add_argument("tests", nargs="*", default=TESTS)
    given = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in given.pairs.split(","):
        rows.append(tested(name, installed(name, PAIRS[name]), [*given.tests]))
    print("|".join(["", *rows[0], ""]), "|".join(["", *["---"] * len(rows[0]), ""]), sep="\n")
    for row in rows:
        print("|".join(["", *(f" {x} " for x in row.values()), ""]))
    return sum(int(row["failed"]) for row in rows)


if __name__ == "__main__":
    sys.exit(min(1, main()))
