"""Download a model from the Hugging Face hub, into the hub's own cache."""

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
"""The files of weights of a model, of which transformers loads the first that there is, and that of
an adapter. Instead of a file there may be parts of it, which an index lists."""


class HubError(KVKeepError):
    """A model could not be downloaded from the hub."""


def hub_error(name: str, error: BaseException) -> HubError:
    """The error to raise when files of a repository could not be downloaded."""
    return HubError(
        f"cannot download {name}: {reason_of(error)}; check the name and the connection, and log "
        "in with `hf auth login` if the model asks for it"
    )


def download(name: str, progress: Progress = silent) -> str:
    """Download what transformers needs of a repository: the config, the tokenizer and the weights
    in one format. What is in the hub's cache already is not downloaded again; a model that is there
    is used as it is when the hub cannot be reached.

    Args:
        name: owner/name, of a model or an adapter.

    Returns:
        The directory.

    Raises:
        HubError: the hub has no such model or cannot be reached, or the model has no weights that
            transformers loads.
    """
    doing = f"downloading {name}"
    progress(doing, None)
    bar = _told(doing, progress)
    try:
        for weights in _WEIGHTS:
            place = _snapshot(name, [*_ALWAYS, weights], bar)
            files = weights_in(place)
            if not all(file.exists() for file in files):  # an index names them
                _snapshot(name, [file.name for file in files], bar)
            if files and all(file.exists() for file in files):
                return str(place)
    except Exception as error:  # of the network, of the hub, of the disk
        raise hub_error(name, error) from error
    raise HubError(
        f"{name} has not all its weights as {' or '.join(_WEIGHTS)}; check the connection, or "
        "download a GGUF file of it, and give its path"
    )


def weights_in(directory: Path) -> list[Path]:
    """The files of weights that transformers loads from a directory, whether or not all the parts
    that an index lists are there; none: []."""
    for name in _WEIGHTS:
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [directory / file for file in sorted(set(listed.values()))]
    return []


def _snapshot(name: str, patterns: list[str], bar: type[tqdm]) -> Path:
    """Download the files of a repository whose names match a pattern; the directory of the files.
    Without the hub: the directory in its cache, which may lack some."""
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
    """A bar for the hub's functions that shows nothing, and tells the share of the bytes."""

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
