"""kvkeep's version, which pyproject.toml reads here, and the versions that it was tested with."""

__version__ = "0.1.0"

TESTED = {"torch": ">=2.13,<2.16", "transformers": ">=5.23,<5.25"}
"""The versions of each package that pyproject.toml admits, tested at both ends."""
