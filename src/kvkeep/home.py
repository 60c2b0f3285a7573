"""Where kvkeep keeps what it fetched, and sessions."""

from __future__ import annotations

import os
from pathlib import Path

from kvkeep.extras import needed_by


def home() -> Path:
    """The directory of converted models and sessions: $KVKEEP_HOME, or one in the user's cache
    directory.

    Raises:
        MissingPackageError: KVKEEP_HOME is not set, and platformdirs is not installed.
    """
    chosen = os.environ.get("KVKEEP_HOME")
    if chosen:
        return Path(chosen)
    with needed_by("Without KVKEEP_HOME, finding the user's cache directory", "cli"):
        import platformdirs  # noqa: PLC0415 (it may be missing)
    return Path(platformdirs.user_cache_path("kvkeep"))
