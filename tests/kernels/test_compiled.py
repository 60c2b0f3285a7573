"""The kernels compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that a program may have
# Queries that are multiplied by scales of channels take all registers on the older generation.
# Codes of two planes are expanded there too, and a word of 2-bit codes takes part in four products.
SPILLED = {
    "kivi": 64,
    "kivi-2-bits": 176,
    "int4-affine": 56,
    "int6": 88,
    "int3": 136,
    "int2": 56,
}
# Products in float32 take no tensor cores, and hold the expanded codes in registers.
SPILLED_IN_FLOAT32 = SPILLED | {"int6": 456, "int3": 512}


def compiled(*arguments):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "support.compile_kernels", *arguments],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "dtypes", "calls"),
    [
        (90, "bfloat16", {"plain": 600, "kivi": 1}),
        pytest.param(90, "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param(80, "bfloat16,float16,float32", {}, marks=pytest.mark.slow),
    ],
)
def test_kernels(capability, dtypes, calls):
    asked = ",".join(f"{codec}:{n}" for codec, n in calls.items())
    found = compiled(str(capability), dtypes, *filter(None, [asked]))
    assert {"append", "attend", "merge", "receive", "weigh"} <= {x["kernel"] for x in found}
    every = {
        "plain",
        "int8",
        "int6",
        "int4",
        "int3",
        "int2",
        "int4-affine",
        "fp8",
        "kivi",
        "kivi-2-bits",
    }
    assert {x["codec"] for x in found} == (set(calls) or every)
    packed = {x["codec"] for x in found if x["kernel"] == "attend" and "sequences" in x}
    assert packed == ({codec for codec, n in calls.items() if n == 1} or every)
    for kernel in found:
        assert kernel["shared"] <= SHARED[capability], kernel
        if kernel["n"] == 1:
            assert kernel["shared"] <= SHARED[capability] // 2, kernel  # two programs at once
            exact = kernel["dtype"] == "torch.float32"
            most = SPILLED_IN_FLOAT32 if exact else SPILLED
            assert kernel["spilled"] <= most.get(kernel["codec"], 16), kernel
