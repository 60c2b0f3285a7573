"""How the native library is found and loaded."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest
from support.instruction_sets import BEST, SETS

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


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
def test_the_environment_chooses_the_instruction_set():
    def told(chosen):
        return subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, "nowhere"],
            env={**os.environ, "KVKEEP_INSTRUCTIONS": chosen},
            capture_output=True,
            text=True,
            check=False,
        )

    for chosen in {SETS[0], SETS[-1]}:
        assert told(chosen).stdout.split() == [chosen, chosen]
    refused = told("avx1024")
    assert refused.returncode == 1
    assert "KVKEEP_INSTRUCTIONS=avx1024" in refused.stderr
    assert "portable" in refused.stderr
