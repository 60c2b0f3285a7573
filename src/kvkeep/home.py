"""The directory of models, sessions and compiled steps."""

from __future__ import annotations

import os
from pathlib import Path

from kvkeep.extras import needed_by


def home() -> Path:
    """The directory of models, sessions and compiled steps: $KVKEEP_HOME, or `kvkeep` in the user's
    cache directory.

    Raises:
        MissingPackageError: KVKEEP_HOME is not set, and platformdirs is not installed.
    """
    chosen = os.environ.get("KVKEEP_HOME")
    if chosen:
        return Path(chosen)
    with needed_by("Without KVKEEP_HOME, finding the user's cache directory", "cli"):
        import platformdirs  # noqa: PLC0415 (it may be missing)
    return Path(platformdirs.user_cache_path("kvkeep"))
