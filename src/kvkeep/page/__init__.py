"""The page of the server, and what pages share: pictures of caches, and `assets/`."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).with_name("assets")
"""Where the parts of pages are."""


def asset(name: str) -> str:
    """The text of a file of `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")
