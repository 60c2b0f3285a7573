"""The native library for 64-bit ARM: cross-compiled, and run by an emulator of the processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

missing = [program for program in (COMPILER, EMULATOR, "cmake") if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True)


def test_numbers(tmp_path):
    system = ("SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64", f"CXX_COMPILER={COMPILER}")
    options = [f"-DCMAKE_{option}" for option in (*system, "BUILD_TYPE=Release")]
    configured = run("cmake", "-S", PROJECT / "native", "-B", tmp_path, *options)
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", tmp_path, "--parallel", 2)
    assert built.returncode == 0, built.stderr
    check, source = tmp_path / "check", Path(__file__).with_name("check.cpp")
    # The library finds the functions of OpenMP in the program that loads it.
    linked = ("-fopenmp", "-ldl", "-Wl,--no-as-needed")
    compiled = run(COMPILER, "-std=c++17", "-I", PROJECT / "native", source, "-o", check, *linked)
    assert compiled.returncode == 0, compiled.stderr
    found = run(EMULATOR, "-L", "/usr/aarch64-linux-gnu", check, tmp_path / "_native.so")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "46 comparisons, 0 failed" in found.stdout
