"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from kvkeep import library


def environment() -> dict[str, Any]:
    """Versions, processor, threads, memory and accelerator of this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "python": platform.python_version(),
        "kvkeep": version("kvkeep"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_kernel": library.instructions() or "none",
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": "none" if accelerator is None else str(accelerator),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_bandwidth(mebibytes: int = 512) -> float:
    """GB/s at which all threads together read memory that no processor cache holds: the best of
    several sums over one large float32 tensor."""
    x = torch.zeros(mebibytes * 2**18)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - start)
    return x.numel() * 4 / best / 1e9
