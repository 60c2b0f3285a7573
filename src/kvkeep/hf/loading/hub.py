"""Downloads models from the Hugging Face hub, into the hub's own cache."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.errors import KVKeepError, reason_of
from kvkeep.host.progress import Progress, silent

_ALWAYS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
"""Names of weight files: of a model, of which transformers loads the first that exists, and of an
adapter. A file may be divided into parts, which an index lists."""


class HubError(KVKeepError):
    """A model could not be downloaded from the hub."""


def hub_error(name: str, error: BaseException) -> HubError:
    """The error for files of a repository that could not be downloaded."""
    return HubError(
        f"cannot download {name}: {reason_of(error)}; check the name and the connection, and log "
        "in with `hf auth login` if the model asks for it"
    )


def download(name: str, progress: Progress = silent) -> str:
    """Download the files of a repository that transformers needs: the config, the tokenizer and the
    weights in one format. Files already in the hub's cache are not downloaded again. If the hub
    cannot be reached, a model in its cache is used without a check for updates.

    Args:
        name: owner/name of a model or an adapter.

    Returns:
        The directory.

    Raises:
        HubError: the hub does not have the model or cannot be reached, or the model has no weights
            that transformers loads.
    """
    doing = f"downloading {name}"
    progress(doing, None)
    bar = _told(doing, progress)
    try:
        for weights in _WEIGHTS:
            place = _snapshot(name, [*_ALWAYS, weights], bar)
            files = weights_in(place)
            if not all(file.exists() for file in files):  # download parts listed by an index
                _snapshot(name, [file.name for file in files], bar)
            if files and all(file.exists() for file in files):
                return str(place)
    except Exception as error:  # network, hub and disk raise many types
        raise hub_error(name, error) from error
    raise HubError(
        f"{name} does not have all its weights as {' or '.join(_WEIGHTS)}; check the connection, "
        "or download a GGUF file of the model and give its path"
    )


def weights_in(directory: Path) -> list[Path]:
    """The weight files that transformers loads from a directory, including parts that an index
    lists but that are missing; []: there are none."""
    for name in _WEIGHTS:
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [directory / file for file in sorted(set(listed.values()))]
    return []


def _snapshot(name: str, patterns: list[str], bar: type[tqdm]) -> Path:
    """Download the files of a repository whose names match a pattern; returns their directory. If
    the hub cannot be reached: the directory in its cache, which may lack files."""
    try:
        found = huggingface_hub.snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=["*/*"], tqdm_class=bar
        )
    except LocalEntryNotFoundError as error:
        incomplete: str | None = getattr(error, "snapshot_path", None)
        if incomplete is None:
            raise
        found = incomplete
    return Path(found)


def _told(doing: str, progress: Progress) -> type[tqdm]:
    """A progress bar class for the hub's functions that shows nothing, and calls `progress` with
    the share of bytes."""

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # given to the hub's own bars
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(doing, min(1.0, self.n / self.total))
            return shown

    return Told
