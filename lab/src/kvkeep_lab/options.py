"""Options of commands as fields of a dataclass, which needs neither torch nor a command line.

`kvkeep_lab.cli.options` makes a command of it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is an option of a command.

    Args:
        help: the text of `--help`.
        more: `separator` of a list's parts in the text of the option, and the `least` of numbers;
            `values`, to complete; `complete`, the name of a function of `kvkeep.cli.complete`;
            `name`, if it is not the field's; `flag`: there is no `--no-...`; and arguments of
            `typer.Option`.
    """
    return field(default=default, metadata={"help": help, **more})


def numbers(default: Any, help: str, least: int = 1, **more: Any) -> Any:
    """A field of whole numbers of at least `least`."""
    return option(default, help, separator=",", least=least, **more)


def names(default: Any, help: str, **more: Any) -> Any:
    """A field of names."""
    return option(default, help, separator=",", **more)


def text_file(help: str = "Use this UTF-8 text instead.") -> Any:
    """A field of the file of a text."""
    return option(None, help, name="--text", exists=True, dir_okay=False)


def spec_list(default: Any, help: str = "Cache specs, separated by semicolons.") -> Any:
    """A field of cache specs."""
    return option(default, help, separator=";", complete="specs")
