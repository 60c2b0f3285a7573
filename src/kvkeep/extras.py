"""Optional packages: one clear error if a package that a feature needs is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.errors import MissingPackageError


@contextmanager
def needed_by(feature: str, extra: str, package: str = "kvkeep") -> Iterator[None]:
    """Wrap the imports of optional packages.

    Args:
        feature: the feature that needs the packages, as the start of a sentence.
        extra: the name under `[project.optional-dependencies]` that installs them.
        package: the distribution with this extra.

    Raises:
        MissingPackageError: a package is not installed or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            reason = f"{error.name.partition('.')[0]}, which is not installed"
        else:
            reason = f"packages that cannot be imported ({error})"
        raise MissingPackageError(
            f"{feature} needs {reason}; pip install '{package}[{extra}]'"
        ) from error
