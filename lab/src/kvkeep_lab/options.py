"""Options of commands that are lists or files, as fields of a dataclass; see `kvkeep.options`."""

from __future__ import annotations

from typing import Any

from kvkeep.options import option


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
