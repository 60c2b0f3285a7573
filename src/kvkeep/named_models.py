"""Short names of models, which installed packages declare as entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

from kvkeep.errors import MissingPackageError, reason_of

GROUP = "kvkeep.models"
"""The group of entry points: the short name of a model -> a `NamedModel`."""

OF_LAB = ("smollm2-135m", "gemma3-270m")
"""The short names that kvkeep-lab declares."""


class NamedModel(Protocol):
    """A model that a package can fetch."""

    @property
    def description(self) -> str:
        """One line about the model."""

    @property
    def directory(self) -> Path:
        """The directory of the model, which exists once it has been fetched."""

    def fetch(self, progress: Callable[[str, float | None], None]) -> Path:
        """Fetch the model, unless it was fetched before, in a form that transformers can load.

        Args:
            progress: see `kvkeep.host.progress.Progress`.

        Returns:
            The directory.
        """


def installed() -> dict[str, EntryPoint]:
    """The entry points of models by short name, without importing them."""
    return {one.name: one for one in entry_points(group=GROUP)}


def loaded(name: str) -> NamedModel:
    """The model of a name in `installed()`.

    Raises:
        MissingPackageError: the package that declares the name cannot be imported.
    """
    entry = installed()[name]
    try:
        found: NamedModel = entry.load()
    except Exception as error:  # importing a package may raise any exception
        raise MissingPackageError(
            f"model {name!r}, which an installed package declares as {entry.value}, cannot be "
            f"imported: {type(error).__name__}: {reason_of(error)}; repair the package, or "
            "uninstall it"
        ) from error
    return found
