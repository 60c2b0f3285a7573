"""Checkpoints of a run: written atomically, verified before use, and never unpickled.

They hold whole tensors, whatever the number of processes, so a run may go on with another number.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.files.atomic import PARTIAL, sync_to_disk
from kvkeep.files.headers import typed
from kvkeep.finetune.processes import Processes, fill
from kvkeep.finetune.trained import Trained
from kvkeep.host.fingerprint import differences
from kvkeep.reading import opened, whole

VERSION = 2
OPTIMIZER = "optimizer.safetensors"
_MOST_STATE = 1 << 26  # bytes
STATE = "kvkeep_finetune.json"

MODEL = "model's "
"""In the options of a run, the prefix of the names that are parts of the model's fingerprint."""

_NAME = re.compile(r"checkpoint-([0-9]+)")
_STEP, _MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter."""


class CheckpointError(KVKeepError, ValueError):
    """A directory that a run cannot write to or resume from."""


@dataclass
class State:
    """The state of a run, besides its weights.

    `options` are everything that the weights depend on. `train_loss` has one loss for each step;
    `eval_loss` maps the steps after which the model was evaluated to losses, from "0" on;
    `eval_accuracy` maps them to the share of texts that got their class, if there are classes.
    """

    options: dict[str, str | int | float | None]
    version: int = VERSION
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: list[float] = field(default_factory=list)
    eval_loss: dict[str, float] = field(default_factory=dict)
    eval_accuracy: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Create and lock the directory of a run, so that no other process writes to it.

    Raises:
        CheckpointError: it cannot be written, or another process holds the lock.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}; give a directory") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is fine-tuning into {out}; wait for it, or give another directory"
            ) from error
        for left in out.glob(f".*{PARTIAL}"):  # left by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def steps_in(out: Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending."""
    found = (_NAME.fullmatch(path.name) for path in out.iterdir())
    return sorted(int(name[1]) for name in found if name)


def require_unused(out: Path, kind: Trained) -> None:
    """Raise CheckpointError if a directory holds a run already."""
    steps = steps_in(out)
    held = [f"checkpoint-{steps[-1]}"] if steps else _result_in(out, kind)
    if held:
        raise CheckpointError(
            f"{out} holds a run already ({held[0]}); resume it with --resume, or give another "
            "directory"
        )


def _result_in(out: Path, kind: Trained) -> list[str]:
    """The files of a result that a directory holds."""
    return [name for name in (kind.weights_file, kind.mark) if (out / name).exists()]


def save(
    out: Path,
    kind: Trained,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: State,
    keep: int,
    processes: Processes,
) -> None:
    """Write a checkpoint of a run, and delete all but the newest `keep`.

    Raises:
        CheckpointError: it cannot be written; the other checkpoints are unchanged.
    """
    target = out / f"checkpoint-{state.step}"
    tensors = {
        f"{name}.{key}": value
        for name, parameter in _trained(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }

    def finish(work: Path) -> None:
        state.files = {path.name: _checksum(path) for path in sorted(work.iterdir())}
        (work / STATE).write_text(_sealed(asdict(state)))
        for path in work.iterdir():
            sync_to_disk(path)
        sync_to_disk(work)
        work.rename(target)
        sync_to_disk(out)
        for old in steps_in(out)[:-keep]:
            gone = out / f".{old}{PARTIAL}"  # renamed first: no incomplete one has the name
            (out / f"checkpoint-{old}").rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    _write(out, str(target), kind, model, processes, {OPTIMIZER: tensors}, finish)


def save_result(out: Path, kind: Trained, model: Any, processes: Processes) -> None:
    """Write the result of a run; the file by which it is recognised is written last.

    Raises:
        CheckpointError: it cannot be written.
    """

    def finish(work: Path) -> None:
        for path in sorted(work.iterdir(), key=lambda path: path.name == kind.mark):
            sync_to_disk(path)
            path.replace(out / path.name)

    _write(out, f"the {kind.noun} to {out}", kind, model, processes, {}, finish)


def _write(
    out: Path,
    what: str,
    kind: Trained,
    model: Any,
    processes: Processes,
    others: Mapping[str, Mapping[str, Tensor]],
    finish: Callable[[Path], None],
) -> None:
    """Write what a run trains, and other tensors by file, to a temporary directory inside the
    run's; then the leading process calls `finish` with it. It is removed at the end.

    Raises:
        CheckpointError: `what` cannot be written.
    """

    @contextmanager
    def step() -> Iterator[None]:
        with processes.together():
            try:
                yield
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"cannot write {what}: {error}; make room, and resume with --resume"
                ) from error

    with ExitStack() as stack:
        work = out
        with step():
            if processes.leads:
                work = stack.enter_context(_partial(out))
                kind.describe(model, work)
        with step():
            processes.write(work / kind.weights_file, kind.weights(model), {"format": "pt"})
        for name, tensors in others.items():
            with step():
                processes.write(work / name, tensors, {})
        with step():
            if processes.leads:
                finish(work)


def newest(out: Path, kind: Trained, options: Mapping[str, Any]) -> tuple[State, Path] | None:
    """The newest checkpoint of a run with these options; None if there is none.

    Raises:
        CheckpointError: it is damaged, or it belongs to another run.
    """
    steps = steps_in(out)
    if not steps:
        if _result_in(out, kind):
            raise CheckpointError(
                f"{out} holds the {kind.noun} of a run but no checkpoint to resume from; give "
                "another directory"
            )
        return None
    path = out / f"checkpoint-{steps[-1]}"
    state = _read(path)
    if state.step != steps[-1]:
        raise _damaged(path / STATE, f"it is of step {state.step}")
    differ = [
        f"{name} is {options.get(name)}, was {state.options.get(name)}"
        for name in sorted({*options, *state.options})
        if options.get(name) != state.options.get(name) and not name.startswith(MODEL)
    ]
    differ += [f"model: {x}" for x in differences(_of_model(state.options), _of_model(options))]
    if differ:
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(differ)}; resume with the same data and "
            "options, or give another directory"
        )
    _verify(path, kind, state)
    return state, path


def at(out: Path, step: int) -> tuple[State, Path]:
    """The checkpoint of a step, which another process has verified.

    Raises:
        CheckpointError: it cannot be read here.
    """
    path = out / f"checkpoint-{step}"
    return _read(path), path


def _of_model(options: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the model's fingerprint among the options of a run."""
    named = ((name, str(value)) for name, value in options.items() if name.startswith(MODEL))
    return {name.removeprefix(MODEL): value for name, value in named}


def restore(path: Path, kind: Trained, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state. Of what is sharded, each process reads its own part.

    Raises:
        CheckpointError: the checkpoint is of something else, or damaged; nothing was changed.
    """
    weights, trained = kind.weights(model), _trained(model)
    with _opened(path / kind.weights_file) as held, _opened(path / OPTIMIZER) as tensors:
        if _shapes(held) != {name: tuple(x.shape) for name, x in weights.items()}:
            raise _damaged(path / kind.weights_file, f"it is of another {kind.noun}")
        shapes = _shapes(tensors)
        known = [(name, p) for name, p in trained if f"{name}.{_STEP}" in shapes]
        expected: dict[str, tuple[int, ...]]
        expected = {f"{name}.{_STEP}": () for name, _ in known}  # without it, it had no gradient
        expected |= {f"{name}.{key}": tuple(p.shape) for name, p in known for key in _MOMENTS}
        if shapes != expected:
            raise _damaged(path / OPTIMIZER, f"it is of another {kind.noun}")
        for name, weight in weights.items():
            fill(weight, held, name)
        for name, parameter in known:
            state = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            for key, x in state.items():
                fill(x, tensors, f"{name}.{key}")
            optimizer.state[parameter] = {_STEP: tensors.get_tensor(f"{name}.{_STEP}"), **state}


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def _trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """The trained parameters by name, in the optimizer's order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _read(path: Path) -> State:
    """The state of a checkpoint; its files are not verified yet."""
    try:
        fields = json.loads(whole(path / STATE, _MOST_STATE))
        checksum = fields.pop("checksum")
        version = fields["version"]
        if version != VERSION:
            raise CheckpointError(
                f"{path} is of version {version}, this kvkeep reads version {VERSION}; resume with "
                "the kvkeep that wrote it"
            )
        if checksum != _seal(fields):
            raise ValueError("it has another checksum")
        state = typed(State, fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path / STATE, str(error)) from error
    return state


def _verify(path: Path, kind: Trained, state: State) -> None:
    """Raise CheckpointError unless a checkpoint has all its files, with their checksums."""
    for name in {kind.weights_file, kind.mark, OPTIMIZER, *state.files}:
        try:
            same = state.files.get(name) == _checksum(path / name)
        except OSError as error:
            raise _damaged(path / name, str(error)) from error
        if not same:
            raise _damaged(path / name, "it has another checksum")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {reason}; remove {path.parent} to resume from the checkpoint before it"
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, from which tensors are read one by one."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _sealed(fields: dict[str, Any]) -> str:
    return json.dumps({**fields, "checksum": _seal(fields)}, indent=1)


def _seal(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def _checksum(path: Path) -> str:
    found = xxhash.xxh3_128()
    with opened(path) as handle, FileIO(handle, closefd=False) as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    digest: str = found.hexdigest()
    return digest


@contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A temporary directory inside a run's, with a name that marks it as incomplete; removed on
    exit."""
    path = out / f".{os.getpid()}{PARTIAL}"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
