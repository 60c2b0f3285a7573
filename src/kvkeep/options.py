"""Options of commands as fields of a dataclass, which needs neither torch nor a command line.

`kvkeep.cli.options` makes a command of it.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def option(default: Any, help: str = "", **more: Any) -> Any:
    """A field that is an option of a command.

    Args:
        help: the text of `--help`; empty: the command does not have the option.
        more: `separator` of a list's parts in the text of the option, and the `least` of numbers;
            `size`: the number is given as text such as 2GB, and this is the default's text (empty:
            there is none); `values`, to complete; `complete`, the name of a function of
            `kvkeep.cli.complete`; `name`, if it is not the field's; `flag`: there is no `--no-...`;
            `unrelated`: the result of the command does not depend on it; and arguments of
            `typer.Option`.
    """
    return field(default=default, metadata={"help": help, **more})


def require_allowed(options: Any, error: type[Exception]) -> None:
    """Raise `error` for a number below the `min` of its field, or a value that is not one of its
    `values`."""
    for one in fields(options):
        name, value, told = one.name, getattr(options, one.name), one.metadata
        if value is not None and not value >= told.get("min", value):
            raise error(f"{name} is {value}; give at least {told['min']}")
        if value not in told.get("values", (value,)):
            raise error(f"{name} is {value!r}; give {' or '.join(told['values'])}")
