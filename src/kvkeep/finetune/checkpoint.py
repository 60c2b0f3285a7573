"""Checkpoints of a run: written atomically, verified before use, and never unpickled.

A checkpoint is a directory in the Trainer's layout, with two differences: the optimizer's state is
a safetensors file, and a list of the files records their checksums. Tensors are saved whole, so a
run may resume with another number of processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.files.atomic import PARTIAL, sync_to_disk, whole_file
from kvkeep.files.headers import typed
from kvkeep.finetune.processes import Processes, fill
from kvkeep.finetune.trained import Trained
from kvkeep.host.fingerprint import differences
from kvkeep.reading import open_file, read_file

VERSION = 3
OPTIMIZER = "optimizer.safetensors"
_MOST_CONTENTS = 1 << 26  # bytes
CONTENTS = "kvkeep_finetune.json"
STATE = "trainer_state.json"  # as the Trainer names it

_NAME = re.compile(r"checkpoint-([0-9]+)")
_STEP, _MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""AdamW's state for a parameter."""


class CheckpointError(KVKeepError, ValueError):
    """A run cannot write to a directory or resume from it."""


@dataclass
class Contents:
    """A checkpoint's step, the options that its weights depend on, the fingerprint of the original
    model, and the checksum of each file."""

    step: int
    options: dict[str, str | int | float | None]
    model: dict[str, str]
    files: dict[str, str]
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoints:
    """The directory of a run, with its checkpoints and its result.

    Attributes:
        kind: the kind of training.
        options: all options that the weights depend on.
        fingerprint: the model's fingerprint.
        keep: number of newest checkpoints to keep.
    """

    out: Path
    kind: Trained
    options: dict[str, str | int | float | None]
    fingerprint: dict[str, str]
    keep: int
    processes: Processes

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Create and lock the directory, so that no other run writes to it.

        Raises:
            CheckpointError: the directory cannot be written, or another process holds the lock.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.out, os.O_RDONLY)
        except OSError as error:
            what = f"cannot write {self.out}: {error.strerror}"
            raise CheckpointError(f"{what}; give a directory") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                what = f"another process is fine-tuning into {self.out}"
                raise CheckpointError(f"{what}; wait, or give another directory") from error
            for left in self.out.glob(f".*{PARTIAL}"):  # from a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(handle)

    def at(self, step: int) -> Path:
        """The directory of the checkpoint after a step."""
        return self.out / f"checkpoint-{step}"

    def _steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.out.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def _result(self) -> list[str]:
        """The names of the result's files that exist."""
        return [x for x in (self.kind.weights_file, self.kind.mark) if (self.out / x).exists()]

    def require_unused(self) -> None:
        """Raise CheckpointError if the directory already holds a run."""
        held = [self.at(step).name for step in self._steps()[-1:]] or self._result()
        if held:
            what = f"{self.out} already holds a run ({held[0]})"
            raise CheckpointError(f"{what}; resume it with --resume, or give another directory")

    def newest(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to a run with other options.
        """
        steps = self._steps()
        if not steps:
            if self._result():
                what = f"{self.out} holds the {self.kind.noun} of a run but no checkpoint"
                raise CheckpointError(f"{what} to resume from; give another directory")
            return 0
        path = self.at(steps[-1])
        contents = _read(path)
        if contents.step != steps[-1]:
            raise _damaged(path / CONTENTS, f"it is from step {contents.step}")
        differ = [
            f"{name} is {self.options.get(name)}, was {contents.options.get(name)}"
            for name in sorted({*self.options, *contents.options})
            if self.options.get(name) != contents.options.get(name)
        ]
        differ += [f"model: {x}" for x in differences(contents.model, self.fingerprint)]
        if differ:
            remedy = "resume with the same data and options, or give another directory"
            raise CheckpointError(f"{path} belongs to another run: {'; '.join(differ)}; {remedy}")
        for name in {self.kind.weights_file, self.kind.mark, OPTIMIZER, STATE, *contents.files}:
            try:
                same = contents.files.get(name) == _checksum(path / name)
            except OSError as error:
                raise _damaged(path / name, str(error)) from error
            if not same:
                raise _damaged(path / name, "it has another checksum")
        return steps[-1]

    def restore_weights(self, path: Path, model: Any) -> None:
        """Load the weights of a checkpoint. Of a sharded tensor, each process reads only its own
        shard.

        Raises:
            CheckpointError: the checkpoint has other tensors, or is damaged; nothing was changed.
        """
        with _opened(path / self.kind.weights_file) as held:
            self._fill(self.kind.weights(model), held, path / self.kind.weights_file)

    def restore_optimizer(self, path: Path, model: Any, optimizer: Any) -> None:
        """Load the optimizer's state from a checkpoint; see `restore_weights`."""
        with _opened(path / OPTIMIZER) as held:
            names = set(held.keys())
            states = {
                name: {_STEP: torch.zeros(()), **{key: torch.zeros_like(p) for key in _MOMENTS}}
                for name, p in _trained(model)
                if f"{name}.{_STEP}" in names  # others had no gradient
            }
            tensors = {f"{name}.{key}": x for name in states for key, x in states[name].items()}
            self._fill(tensors, held, path / OPTIMIZER)
        optimizer.state.update({p: states[n] for n, p in _trained(model) if n in states})

    def _fill(self, tensors: Mapping[str, Tensor], held: Any, path: Path) -> None:
        shapes = {name: tuple(held.get_slice(name).get_shape()) for name in list(held.keys())}
        if shapes != {name: tuple(x.shape) for name, x in tensors.items()}:
            raise _damaged(path, f"it belongs to another {self.kind.noun}")
        for name, x in tensors.items():
            fill(x, held, name)

    def save(self, model: Any, optimizer: Any, state: Any) -> None:
        """Write a checkpoint, and delete all but the newest `keep` checkpoints.

        Args:
            state: the Trainer's state.

        Raises:
            CheckpointError: the checkpoint cannot be written; other checkpoints are unchanged.
        """
        target, work = self.at(state.global_step), self.out / f".{os.getpid()}{PARTIAL}"
        weights, leads = self.kind.weights(model), self.processes.leads
        tensors = {
            f"{name}.{key}": value
            for name, parameter in _trained(model)
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        try:
            with self._writing(target):
                if leads:
                    work.mkdir()
                    self.kind.describe(model, work)
                    state.save_to_json(str(work / STATE))
            for name, some in ((self.kind.weights_file, weights), (OPTIMIZER, tensors)):
                with self._writing(target):
                    self.processes.write(work / name, some, {"format": "pt"})
            with self._writing(target):
                if leads:
                    self._finish(work, state.global_step)
        finally:
            if leads:
                shutil.rmtree(work, ignore_errors=True)

    def _finish(self, work: Path, step: int) -> None:
        """Turn a complete directory into the checkpoint of a step, and delete old checkpoints."""
        files = {path.name: _checksum(path) for path in sorted(work.iterdir())}
        contents = Contents(step, self.options, self.fingerprint, files)
        (work / CONTENTS).write_text(json.dumps(asdict(contents), indent=1))
        for path in work.iterdir():
            sync_to_disk(path)
        sync_to_disk(work)
        work.rename(self.at(step))
        sync_to_disk(self.out)
        for old in self._steps()[: -self.keep]:
            # Rename first: no incomplete checkpoint keeps the name.
            gone = self.out / f".{old}{PARTIAL}"
            self.at(old).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def copy_result(self, step: int) -> None:
        """Copy the result's files from the checkpoint of the last step; the file by which loaders
        recognise the result is written last.

        Raises:
            CheckpointError: a file cannot be written.
        """
        with self._writing(self.out):
            if not self.processes.leads:
                return
            names = {path.name for path in self.at(step).iterdir()} - {OPTIMIZER, STATE, CONTENTS}
            for name in sorted(names, key=lambda name: (name == self.kind.mark, name)):
                with whole_file(self.out / name, sync=True) as copy:
                    shutil.copyfile(self.at(step) / name, str(copy.name))

    @contextmanager
    def _writing(self, what: Path) -> Iterator[None]:
        """A context in which an error of one process raises in all processes.

        Raises:
            CheckpointError: `what` cannot be written.
        """
        with self.processes.together():
            try:
                yield
            except (OSError, ValueError) as error:
                remedy = "make room, and resume with --resume"
                raise CheckpointError(f"cannot write {what}: {error}; {remedy}") from error


def _trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The trained parameters by name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _read(path: Path) -> Contents:
    """Read a checkpoint's `Contents`, without verifying its files."""
    try:
        fields = json.loads(read_file(path / CONTENTS, _MOST_CONTENTS))
        if fields["version"] != VERSION:
            what = f"{path} is in format version {fields['version']}, this kvkeep reads {VERSION}"
            raise CheckpointError(f"{what}; resume with the version that wrote it")
        return typed(Contents, fields)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path / CONTENTS, str(error)) from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    remedy = f"remove {path.parent} to resume from the checkpoint before it"
    return CheckpointError(f"{path} is damaged: {reason}; {remedy}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file to read single tensors."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _checksum(path: Path) -> str:
    with open_file(path) as handle, FileIO(handle, closefd=False) as file:
        return str(hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())
