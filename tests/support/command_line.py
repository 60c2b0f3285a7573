"""Commands of kvkeep, run in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvkeep.cli.app import app


def run(*arguments: object, **options: Any) -> Result:
    """Run `kvkeep` with these arguments."""
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


def last_line(result: Result, code: int = 0) -> Any:
    """The JSON on the last line of what a command printed, which ended with the exit code."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])
