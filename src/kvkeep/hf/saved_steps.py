"""Compiled steps on disk: found again by later processes, by what they were compiled for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from tempfile import mkdtemp
from time import time
from types import CodeType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from kvkeep.errors import MissingPackageError
from kvkeep.files.atomic import PRIVATE_DIRECTORY, whole_file
from kvkeep.home import home
from kvkeep.version import __version__

_MOST = 64  # files that are kept, those used last
_DAY = 86400  # seconds
_FORMAT = 2
_UNRELATED = {"_name_or_path", "name_or_path", "transformers_version"}
_BOOKKEEPING = vars(nn.Module()).keys() - {"training"} | {"_is_stateful"}
"""What a config, and what a module, has that no step depends on."""


def directory() -> Path | None:
    """Where compiled steps are kept: $KVKEEP_STEPS, or `steps` in kvkeep's own directory. None:
    nowhere, because the variable is empty, nothing can be written there, or others can."""
    chosen = os.environ.get("KVKEEP_STEPS")
    if chosen == "":
        return None
    with suppress(MissingPackageError, OSError):
        found = Path(chosen) if chosen else home() / "steps"
        found.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIRECTORY)
        return found if os.access(found, os.W_OK) and _is_private(found) else None
    return None


def _is_private(place: Path) -> bool:
    """Whether only this user writes to a directory: what lies there is run."""
    if os.name != "posix":
        return True
    about = place.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (S_IWGRP | S_IWOTH)


@cache
def _own_directory() -> Path:
    return Path(mkdtemp(prefix="kvkeep-steps-"))


def new_file(name: str) -> Path:
    """Where to write a compiled step, to be kept by `keep` or deleted."""
    place = directory() or _own_directory()
    return place / f"{name}.{os.getpid()}.pt2"


def keep(file: Path, name: str, description: Mapping[str, Any]) -> None:
    """Let later processes find a compiled step."""
    place = file.parent
    final = file.replace(place / f"{name}.pt2")
    described = {"sha256": _digest(final), **description}
    with whole_file(place / f"{name}.json", sync=False, private=True) as out:
        out.write(json.dumps(described).encode())
    _prune(place)


def exist(model: PreTrainedModel) -> bool:
    """Whether there is a compiled step of a model."""
    place = directory()
    return place is not None and any(place.glob(f"{key_of(model)}-*.json"))


def name_of(model: PreTrainedModel, inputs: Sequence[str], rows: int) -> str:
    """The name of a compiled step.

    Args:
        model: the model.
        inputs: the names of the arguments that the step is given.
        rows: their number of rows.
    """
    return f"{key_of(model)}-{'-'.join(inputs)}-{rows}"


def find(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The file of a compiled step and its description; None: there is none, or it is damaged."""
    place = directory()
    if place is None:
        return None
    file, about = place / f"{name}.pt2", place / f"{name}.json"
    try:
        described = json.loads(about.read_text())
        if described.pop("sha256") != _digest(file):
            return None
        about.touch()
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return file, described


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _prune(place: Path) -> None:
    with suppress(OSError):
        found = sorted(place.glob("*.json"), key=lambda x: x.stat().st_mtime, reverse=True)
        for about in found[_MOST:]:
            about.unlink(missing_ok=True)
            about.with_suffix(".pt2").unlink(missing_ok=True)
        for file in place.glob("*.pt2"):  # of processes that ended before it was kept
            alone = not file.with_suffix(".json").exists()
            if alone and file.stat().st_mtime < time() - _DAY:
                file.unlink(missing_ok=True)


# -- the key -------------------------------------------------------------------------------------


def key_of(model: PreTrainedModel) -> str:
    """A digest of all that a compiled step of a model depends on: versions, the processor, config,
    and what its modules and weights are, but not the values of weights."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNRELATED}
    first: dict[int, str] = {}  # the name of each weight, by which those tied to it are known
    weights = [
        (name, first.setdefault(id(x), name), str(type(x)), [*x.shape], [*x.stride()], str(x.dtype))
        for named in (model.named_parameters, model.named_buffers)
        for name, x in named(remove_duplicate=False)
    ]
    kinds = {kind: _digest_of(kind) for kind in {type(module) for module in model.modules()}}
    modules = [
        (name, kinds[type(module)], _settings(vars(module)))
        for name, module in model.named_modules()
    ]
    about = (_FORMAT, _versions(), _processor(), config, weights, modules)
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=_text).encode()).hexdigest()[
        :40
    ]


@cache
def _versions() -> list[str]:
    # A version of kvkeep that is being developed changes without its number.
    source = hashlib.sha256()
    for part in ("graph", "hf", "attention", "."):
        for file in sorted((Path(__file__).parent.parent / part).glob("*.py")):
            source.update(file.read_bytes())
    versions = (__version__, torch.__version__, transformers.__version__)
    return [*map(str, versions), source.hexdigest()]


def _processor() -> list[str]:
    """The instructions that the compiler may use."""
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), _flags()]


@cache
def _flags() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _digest_of(kind: type[nn.Module]) -> tuple[str, str]:
    """The name of a module's class, and a digest of its forward's code."""
    code = getattr(kind.forward, "__code__", None)
    digest = hashlib.sha256(b"" if code is None else code.co_code)
    if code is not None:
        digest.update(repr((code.co_names, *map(_constant, code.co_consts))).encode())
    return f"{kind.__module__}.{kind.__qualname__}", digest.hexdigest()[:16]


def _constant(value: Any) -> str:
    return value.co_name if isinstance(value, CodeType) else repr(value)


def _text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _settings(owned: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes that are plain values."""
    found = {
        name: value
        for name, value in owned.items()
        if name not in _BOOKKEEPING | _UNRELATED and _is_plain(value)
    }
    return {name: value for name, value in found.items() if value not in ({}, [], ())}


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(x, str) for x in value) and _all_plain(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return _all_plain(value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _all_plain(values: Iterable[object]) -> bool:
    return all(map(_is_plain, values))
