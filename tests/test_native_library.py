"""How the native library is found and loaded."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys

import pytest
from support.instruction_sets import BEST

from kvkeep import native_library

WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(
    __file__=sys.argv[1], float32=0, bfloat16=1, float16=2
)
from kvkeep import native_library
print(native_library.reason)
print(native_library.instructions())
"""


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@pytest.mark.skipif(not ctypes.util.find_library("gomp"), reason="the system has no libgomp")
def test_a_torch_that_shows_no_openmp(tmp_path):
    torch = tmp_path / "torch" / "__init__.py"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(torch)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert told.stdout.splitlines() == [BEST, BEST]
