"""Download a model from the Hugging Face hub, into the hub's own cache."""

from __future__ import annotations

import io
from typing import Any

import huggingface_hub
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.errors import KVKeepError
from kvkeep.host.progress import Progress, silent

_ALWAYS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = (".safetensors", ".bin")
"""The formats of weights that transformers loads; the first that a repository has."""


class HubError(KVKeepError):
    """A model could not be downloaded from the hub."""


def download(name: str, progress: Progress = silent) -> str:
    """Download what transformers needs of a repository: the config, the tokenizer and one format of
    weights. What is there already is not downloaded again.

    Args:
        name: owner/name.

    Returns:
        The directory.

    Raises:
        HubError: the hub has no such model or cannot be reached, or the model has no weights that
            transformers loads.
    """
    doing = f"downloading {name}"
    progress(doing, None)
    try:
        files = huggingface_hub.list_repo_files(name)
        found = [one for one in _WEIGHTS if any(file.endswith(one) for file in files)]
        if not found:
            raise HubError(
                f"{name} has no weights as {' or '.join(_WEIGHTS)}; download a GGUF file of it, "
                "and give its path"
            )
        return huggingface_hub.snapshot_download(
            name,
            allow_patterns=[*_ALWAYS, f"*{found[0]}"],
            ignore_patterns=["*/*"],  # other formats, in directories of their own
            tqdm_class=_told(doing, progress),
        )
    except HubError:
        raise
    except Exception as error:  # of the network, of the hub, of the disk
        reason = " ".join(str(error).split())[:300]
        raise HubError(
            f"cannot download {name}: {reason}; check the name and the connection, and log in with "
            "`hf auth login` if the model asks for it"
        ) from error


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
