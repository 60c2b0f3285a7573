"""The server's page, and the code shared by pages: pictures of caches, and `assets/`."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).with_name("assets")
"""The directory with the files of pages."""


def asset(name: str) -> str:
    """The text of a file of `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")
