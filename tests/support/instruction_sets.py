"""The instruction sets of this processor for which the native library has code."""

from __future__ import annotations

import sys

from kvkeep import native_library
from kvkeep.errors import UnsupportedError


def _usable(name: str) -> bool:
    try:
        native_library.use_instructions(name)
    except UnsupportedError:
        return False
    return True


BEST = native_library.instructions()
SETS = [name for name in native_library.INSTRUCTION_SETS if _usable(name)]
if native_library.available:
    native_library.use_instructions(BEST)

if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in SETS)
