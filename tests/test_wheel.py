"""The wheels, installed as users do: in an environment of their own, away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvkeep

pytest.importorskip("auditwheel", reason="the extra dev builds wheels")
pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parent.parent
SET_UP = ("PYTHONPATH", "PYTHONHOME", "KVKEEP_NATIVE")
"""Environment variables that would lead from a new environment to the checkout."""


class Installed:
    """An environment with torch and with what `kvkeep[cli,gguf]` needs, in which programs run in a
    directory of their own."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "environment" / "bin"
        self.directory = folder / "elsewhere"
        self.directory.mkdir()
        venv.create(folder / "environment", with_pip=True)
        # The exact version is the build for the CPU.
        self.pip("-c", PROJECT / "constraints.txt", "torch==2.13.0")

    def pip(self, *arguments: object) -> None:
        self.run("pip", "install", "-q", *arguments)

    def run(self, program: str, *arguments: object) -> str:
        """What it prints."""
        command = [str(self.programs / program), *map(str, arguments)]
        environment = {name: text for name, text in os.environ.items() if name not in SET_UP}
        done = subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def doctor(self) -> tuple[dict[str, str], dict[str, str]]:
        """Its report, and that on the native library."""
        report = json.loads(self.run("kvkeep", "doctor", "--json").splitlines()[-1])
        native, *_ = report["backends"]
        assert native["backend"] == "native"
        return report, native

    def answer(self) -> str:
        question = ("--dtype", "float32", "--max-new-tokens", "8", "What is photosynthesis?")
        printed = self.run("kvkeep", "generate", "--model", "smollm2-135m", "--json", *question)
        text = json.loads(printed.splitlines()[-1])["text"]
        assert text
        return text


@pytest.fixture
def dist(tmp_path):
    """The folder that `make wheel` fills."""
    make = shutil.which("make") or pytest.skip("there is no make")
    where = [f"BIN={Path(sys.executable).parent}", f"DIST={tmp_path / 'dist'}"]
    # These tests run, so their environment is installed.
    subprocess.run([make, "-o", ".venv/installed", "wheel", *where], cwd=PROJECT, check=True)
    return tmp_path / "dist"


def test_the_wheels(dist, tmp_path):
    version = kvkeep.__version__
    (lab,) = dist.glob("kvkeep_lab-*-none-any.whl")
    native, pure = sorted(
        dist.glob("kvkeep-*.whl"), key=lambda path: path.name.endswith("-any.whl")
    )
    assert native.name.startswith(f"kvkeep-{version}-py3-none-manylinux_2_28_")
    assert pure.name == f"kvkeep-{version}-py3-none-any.whl"
    source = PROJECT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "kvkeep").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert _packaged(pure) == files
    assert _packaged(native) == files | {"kvkeep/attention/_native.so"}

    with tarfile.open(dist / f"kvkeep-{version}.tar.gz") as archive:
        top = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
    documents = {"README.md", "CHANGELOG.md", "LICENSE"}
    assert top == documents | {"native", "src", "pyproject.toml", "PKG-INFO"}

    installed = Installed(tmp_path)
    installed.pip("-c", PROJECT / "constraints.txt", f"{pure}[cli,gguf]")
    report, backend = installed.doctor()
    assert report["native_kernel"] == "none"
    assert not backend["usable"]
    assert "--no-binary kvkeep" in backend["about"]
    assert "bench" not in installed.run("kvkeep", "--help")
    assert json.loads(installed.run("kvkeep", "models", "--json")) == {"models": []}
    installed.pip("--no-index", lab)
    assert "bench" in installed.run("kvkeep", "--help")
    answer = installed.answer()

    # Of both wheels, pip prefers the one for this platform.
    installed.pip("--no-index", "--no-deps", "--force-reinstall", "--find-links", dist, "kvkeep")
    report, backend = installed.doctor()
    assert report["kvkeep"] == version
    assert backend["usable"]
    assert installed.answer() == answer
    assert installed.run("kvkeep", "--version") == f"kvkeep {version}\n"
    assert "generate" in installed.run("kvkeep", "--help")

    shutil.copy(PROJECT / "tests/support/instruction_sets.py", installed.directory)
    told = installed.run(
        "python", "-c", "import json, instruction_sets as i; print(json.dumps([i.BEST, i.SETS]))"
    )
    best, usable = json.loads(told)
    assert report["native_kernel"] == best == usable[0]
    assert usable[-1] == "portable"

    shutil.copy(PROJECT / "examples/chat.py", installed.directory)
    assert "tokens found" in installed.run("python", "chat.py", "store")


def _packaged(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if name.startswith("kvkeep/") and not name.endswith("/")}
