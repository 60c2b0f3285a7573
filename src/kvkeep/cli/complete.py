"""Shell completion of option values. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from kvkeep import codec, policy, storage
from kvkeep.errors import KVKeepError
from kvkeep.home import home
from kvkeep.named_models import installed
from kvkeep.registry import Part

_MODEL_FILES = ("config.json", "*.gguf", "adapter_config.json")

Completion = Callable[[str], list[str]]


def specs(incomplete: str) -> list[str]:
    """Specs with this prefix. A semicolon separates specs."""
    before, semicolon, spec = incomplete.rpartition(";")
    codecs, storages = _suggested(codec.PARTS), _suggested(storage.PARTS)
    policies = [*_suggested(policy.PARTS), *(f"{alias}:1024" for alias in policy.ALIASES)]
    for separator, names in (("@", storages), ("/", codecs), ("+", codecs)):
        head, found, tail = spec.rpartition(separator)
        if found:
            start = before + semicolon + head + separator
            return [start + name for name in _matching(tail, names)]
    return [before + semicolon + one for one in _matching(spec, policies)]


def models(incomplete: str) -> list[str]:
    """Short names of models, and directories with a model."""
    return [*_matching(incomplete, sorted(installed())), *_directories(incomplete, _MODEL_FILES)]


def adapters(incomplete: str) -> list[str]:
    """Directories that contain an adapter."""
    return _directories(incomplete, _MODEL_FILES[-1:])


def sessions(incomplete: str) -> list[str]:
    """Names of saved sessions."""
    with suppress(KVKeepError, OSError):
        return _matching(incomplete, sorted(one.stem for one in (home() / "sessions").glob("*.kv")))
    return []


def one_of(*values: str) -> Completion:
    """Complete to one of the values."""
    return lambda incomplete: _matching(incomplete, values)


def several_of(*values: str) -> Completion:
    """Complete the last of several comma-separated values."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + one for one in _matching(last, values)]

    return complete


dtypes = one_of("auto", "float32", "bfloat16", "float16")
devices = one_of("cpu", "cuda")


def _suggested(parts: Mapping[str, Part]) -> list[str]:
    return [part.suggested for part in parts.values() if part.suggested]


def _matching(beginning: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(beginning)]


def _directories(incomplete: str, files: Iterable[str]) -> list[str]:
    """Directories with this prefix that contain a file of `files`."""
    before, slash, _ = incomplete.rpartition("/")
    with suppress(OSError):
        return sorted(
            one
            for child in Path(before + slash or ".").iterdir()
            if (one := before + slash + child.name).startswith(incomplete)
            and child.is_dir()
            and any(next(child.glob(file), None) is not None for file in files)
        )
    return []
