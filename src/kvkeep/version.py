"""kvkeep's version (pyproject.toml reads it from this file) and the tested package versions."""

__version__ = "0.1.0"

TESTED = {"torch": ">=2.13,<2.16", "transformers": ">=5.23,<5.25"}
"""The versions of each package that pyproject.toml admits, tested at both ends."""
