"""Checkpoints of a run: written atomically, verified before use, and never unpickled.

A checkpoint is a directory in the Trainer's layout, but for the optimizer's state, which is a
safetensors file, and a list of the files with their checksums. They hold whole tensors, whatever
the number of processes, so a run may go on with another number.
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
"""AdamW's state of a parameter."""


class CheckpointError(KVKeepError, ValueError):
    """A directory that a run cannot write to or resume from."""


@dataclass
class Contents:
    """What a checkpoint is of: the step after which it was written, the options that its weights
    depend on, the fingerprint of the model as it was given, and the checksum of each file."""

    step: int
    options: dict[str, str | int | float | None]
    model: dict[str, str]
    files: dict[str, str]
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoints:
    """The directory of a run, with its checkpoints and its result.

    Attributes:
        out: the directory.
        kind: what is trained.
        options: all that the weights depend on, but for the model.
        fingerprint: of the model.
        keep: how many of the newest checkpoints to keep.
        processes: the processes of the run.
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
            CheckpointError: it cannot be written, or another process holds the lock.
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
            for left in self.out.glob(f".*{PARTIAL}"):  # left by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(handle)

    def at(self, step: int) -> Path:
        """The checkpoint after a step."""
        return self.out / f"checkpoint-{step}"

    def _steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.out.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def _result(self) -> list[str]:
        """The names of the files of a result that are there."""
        return [x for x in (self.kind.weights_file, self.kind.mark) if (self.out / x).exists()]

    def require_unused(self) -> None:
        """Raise CheckpointError if the directory holds a run already."""
        held = [self.at(step).name for step in self._steps()[-1:]] or self._result()
        if held:
            what = f"{self.out} holds a run already ({held[0]})"
            raise CheckpointError(f"{what}; resume it with --resume, or give another directory")

    def newest(self) -> int:
        """The step of the newest checkpoint, which is complete and of a run with these options; 0
        if there is none.

        Raises:
            CheckpointError: it is damaged, or it belongs to another run.
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
            raise _damaged(path / CONTENTS, f"it is of step {contents.step}")
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
        """Load the weights of a checkpoint. Of what is sharded, each process reads its own part.

        Raises:
            CheckpointError: the checkpoint is of something else, or damaged; nothing was changed.
        """
        with _opened(path / self.kind.weights_file) as held:
            self._fill(self.kind.weights(model), held, path / self.kind.weights_file)

    def restore_optimizer(self, path: Path, model: Any, optimizer: Any) -> None:
        """Load the optimizer's state of a checkpoint; see `restore_weights`."""
        with _opened(path / OPTIMIZER) as held:
            names = set(held.keys())
            states = {
                name: {_STEP: torch.zeros(()), **{key: torch.zeros_like(p) for key in _MOMENTS}}
                for name, p in _trained(model)
                if f"{name}.{_STEP}" in names  # a parameter without it had no gradient
            }
            tensors = {f"{name}.{key}": x for name in states for key, x in states[name].items()}
            self._fill(tensors, held, path / OPTIMIZER)
        optimizer.state.update({p: states[n] for n, p in _trained(model) if n in states})

    def _fill(self, tensors: Mapping[str, Tensor], held: Any, path: Path) -> None:
        shapes = {name: tuple(held.get_slice(name).get_shape()) for name in list(held.keys())}
        if shapes != {name: tuple(x.shape) for name, x in tensors.items()}:
            raise _damaged(path, f"it is of another {self.kind.noun}")
        for name, x in tensors.items():
            fill(x, held, name)

    def save(self, model: Any, optimizer: Any, state: Any) -> None:
        """Write a checkpoint, and delete all but the newest `keep`.

        Args:
            state: the Trainer's state.

        Raises:
            CheckpointError: it cannot be written; the other checkpoints are unchanged.
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
        """Make a complete directory the checkpoint of a step, and delete old ones."""
        files = {path.name: _checksum(path) for path in sorted(work.iterdir())}
        contents = Contents(step, self.options, self.fingerprint, files)
        (work / CONTENTS).write_text(json.dumps(asdict(contents), indent=1))
        for path in work.iterdir():
            sync_to_disk(path)
        sync_to_disk(work)
        work.rename(self.at(step))
        sync_to_disk(self.out)
        for old in self._steps()[: -self.keep]:
            gone = self.out / f".{old}{PARTIAL}"  # renamed first: no incomplete one has the name
            self.at(old).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def copy_result(self, step: int) -> None:
        """Copy what the checkpoint of the last step holds beside the run's state; the file by which
        the result is recognised is written last.

        Raises:
            CheckpointError: it cannot be written.
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
        """A context that all processes leave alike.

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
    """What a checkpoint is of; its files are not verified yet."""
    try:
        fields = json.loads(read_file(path / CONTENTS, _MOST_CONTENTS))
        if fields["version"] != VERSION:
            what = f"{path} is of version {fields['version']}, this kvkeep reads {VERSION}"
            raise CheckpointError(f"{what}; resume with the kvkeep that wrote it")
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
    """A safetensors file, from which tensors are read one by one."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _checksum(path: Path) -> str:
    with open_file(path) as handle, FileIO(handle, closefd=False) as file:
        return str(hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())
