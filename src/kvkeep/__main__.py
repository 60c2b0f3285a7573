"""The command `kvkeep`, which `python -m kvkeep` runs too."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from kvkeep.errors import MissingPackageError


def main() -> None:
    """Run the command line; exit with 2 and one line on stderr if its packages are missing."""
    try:
        from kvkeep.cli.app import app  # noqa: PLC0415 (its packages may be missing)
    except MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    _quiet()
    app(prog_name="kvkeep")


def _quiet() -> None:
    """Hide the warnings of libraries, unless options of Python or of the libraries ask for them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if "--debug" not in sys.argv and not sys.warnoptions:
        # torchao lacks libraries for GPUs on a CPU, and torch tells what torchao does wrong.
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"kvkeep\b")
        warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"warning: {message}\n")


if __name__ == "__main__":
    main()
