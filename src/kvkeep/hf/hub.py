"""Download a model from the Hugging Face hub, into the hub's own cache."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import huggingface_hub
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.errors import KVKeepError, reason_of
from kvkeep.host.progress import Progress, silent

_ALWAYS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
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
    try:
        try:
            files = huggingface_hub.list_repo_files(name)
        except Exception:  # of the network, of the hub
            if (cached := _cached(name)) is None:
                raise
            return cached
        bar = _told(doing, progress)
        weights = _weights(
            files, lambda file: huggingface_hub.hf_hub_download(name, file, tqdm_class=bar)
        )
        if not weights:
            raise HubError(
                f"{name} has no weights as {' or '.join(_WEIGHTS)}; download a GGUF file of it, "
                "and give its path"
            )
        others = [file for file in files if file.endswith(_ALWAYS) and "/" not in file]
        return huggingface_hub.snapshot_download(
            name, allow_patterns=[*others, *weights], tqdm_class=bar
        )
    except HubError:
        raise
    except Exception as error:  # of the network, of the hub, of the disk
        raise hub_error(name, error) from error


def weights_in(directory: Path) -> list[str]:
    """The files of weights that transformers loads from a directory, whether or not all the parts
    that an index lists are there; none: []."""
    return _weights({file.name for file in directory.iterdir()}, directory.joinpath)


def _weights(files: Collection[str], path_of: Callable[[str], str | Path]) -> list[str]:
    for name in _WEIGHTS:
        if name in files:
            return [name]
        if (index := f"{name}.index.json") in files:
            listed = json.loads(Path(path_of(index)).read_text(encoding="utf-8"))
            return sorted(set(listed["weight_map"].values()))
    return []


def _cached(name: str) -> str | None:
    """The directory of a repository in the hub's cache, if it has all its weights."""
    try:
        # The pattern: files that transformers does not need may be missing.
        place = huggingface_hub.snapshot_download(
            name, allow_patterns=["config.json"], local_files_only=True
        )
        weights = weights_in(Path(place))
    except (OSError, ValueError):  # not there, or only in part
        return None
    return place if weights and all(Path(place, file).exists() for file in weights) else None


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
