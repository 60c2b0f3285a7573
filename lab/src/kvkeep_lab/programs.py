"""Programs that a command starts and waits for."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any


def run(
    command: Sequence[str], attend: Callable[[subprocess.Popen[str]], object], **options: Any
) -> str:
    """Run a program to its end.

    Args:
        attend: called with the process while it runs; if that raises, the process is ended.
        options: of `subprocess.Popen`.

    Returns:
        Nothing if it succeeded, otherwise the last line of its errors.
    """
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stderr=errors, text=True, **options) as process:
            try:
                attend(process)
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        said = errors.read().strip().splitlines()
    return (said or [f"it ended with {process.returncode}"])[-1] if process.returncode else ""
