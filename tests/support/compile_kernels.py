"""Compile the Triton kernels for a GPU that is not here, in tests/:

    python -m support.compile_kernels CAPABILITY DTYPES [CALLS]

With CALLS, such as "plain:600,kivi:1", only these codecs, each with one number of queries.
Prints a line of JSON for each kernel that a call would have launched.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import kvkeep.attention.triton as backend
from kvkeep.attention import Rotation, View, triton_packed
from kvkeep.attention.options import Options
from kvkeep.codec import Fp8, Int2, Int3, Int4, Int6, Int8, Kivi, Plain
from kvkeep.layer.write_tokens import append, by_kernel
from kvkeep.planes import Reach
from support.attend_calls import dense, qkv, segment

CODECS = {
    "plain": Plain(),
    "int8": Int8(),
    "int6": Int6(),
    "int4": Int4(),
    "int3": Int3(16, hadamard=False, scale=8),
    "int2": Int2(hadamard=False),
    "int4-affine": Int4(affine=True),
    "fp8": Fp8(),
    "kivi": Kivi(),
    "kivi-2-bits": Kivi(2),
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Driver:
    """Of a device that only has a name."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target


def spilled(kernel):
    """Bytes of registers that each thread keeps in memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.search(r"STACK:(\d+).*LOCAL:(\d+)", used).groups()))


def everything(view, q, k, v, codec):
    """Empty slots, reaches, a length on the device, a segment that all rows share, and for several
    queries bounds."""
    (own,) = view.segments
    own = own._replace(used=torch.tensor(2000, dtype=torch.int32))
    turned = Rotation(7, torch.ones(64))
    shared = segment(k, v, torch.arange(k.shape[2]), turned, codec, codec)
    rows = view.position.expand(len(q), -1)
    reaches = (Reach(64, 4), Reach(900), Reach(99, 0, 3, 9))
    bounds = torch.stack([rows - 70, rows + 5], dim=1) if view.chunk > 1 else None
    return View((shared, own), rows, True, reaches, bounds)


def told(compiled, **what):
    """Print what is known of compiled kernels."""
    for kernel, result in compiled:
        spills = {"spilled": spilled(result), "shared": result.metadata.shared}
        print(json.dumps({"kernel": kernel, **what, **spills}))


def main(capability, dtypes, asked):
    calls = {name: list(product((1, 600), (True, False))) for name in CODECS}
    if asked:
        calls = {name: [(int(n), True)] for name, n in asked}
    triton.runtime.driver.set_active(Driver(capability))
    compiled = []
    run = JITFunction.run

    def only_compile(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))

    JITFunction.run = only_compile
    backend.reason = lambda: ""
    backend.tiles.processors = lambda device: 132
    for name, own in calls.items():
        codec = CODECS[name]
        for dtype in dtypes:
            for n, rich in own:
                q, k, v = qkv(rows=2, heads=8, group=4, slots=2048, n=n, width=128, dtype=dtype)
                view = dense(k, v, n, key=codec, value=codec)
                options = Options(0.1)
                if rich:
                    view = everything(view, q, k[:1], v[:1], codec)
                    options = Options(0.1, 30.0, torch.randn(32), True, 3)
                compiled.clear()
                backend.run(q, view, options)
                planes, (rows, heads) = view.segments[0].planes, k.shape[:2]
                cursor = torch.zeros(rows, heads, 1, dtype=torch.int64)
                if by_kernel(codec):
                    append(k[:, :, :1], v[:, :, :1], torch.zeros(1), planes, cursor, codec, codec)
                told(compiled, codec=name, dtype=str(dtype), n=n)
            if 1 not in dict(own):
                continue
            q, k, v = qkv(heads=8, group=4, slots=2048, width=128, dtype=dtype)
            several = torch.cat([q] * 3, dim=2), [dense(k, v, 1, key=codec, value=codec)] * 3
            compiled.clear()
            triton_packed.run_packed(*several, Options(0.1, 30.0))
            told(compiled, codec=name, dtype=str(dtype), n=1, sequences=3)


if __name__ == "__main__":
    capability, dtypes, *asked = sys.argv[1:]
    main(
        int(capability),
        [getattr(torch, name) for name in dtypes.split(",")],
        [call.split(":") for call in asked[0].split(",")] if asked else [],
    )
