"""The option --import: a Python file that runs before a command, e.g. to add a policy."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import typer


def import_file(path: Path) -> None:
    """Run a Python file as a module.

    Raises:
        BadParameter: the file is not a Python file, or raises an exception.
    """
    name = f"kvkeep_import_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"--import {path}: not a Python file; its name must end in .py")
    # Dataclasses look up their module in sys.modules to resolve the types of their fields.
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise any exception
        raise typer.BadParameter(
            f"--import {path}: {type(error).__name__}: {error}; correct the file"
        ) from error
