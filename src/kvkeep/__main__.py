"""The command `kvkeep`, which `python -m kvkeep` runs too."""

from __future__ import annotations

import sys

from kvkeep.errors import MissingPackageError


def main() -> None:
    """Run the command line; exit with 2 and one line on stderr if its packages are missing."""
    try:
        from kvkeep.cli import app  # noqa: PLC0415 (its packages may be missing)
    except MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    app(prog_name="kvkeep")


if __name__ == "__main__":
    main()
