"""The old place of `kvkeep.generate.sampling`, until kvkeep.serve and kvkeep.finetune import it."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("kvkeep.generate.sampling"), name)
