"""The hardware and the package versions of this machine, to report with measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvkeep import native_library
from kvkeep.choice import processor
from kvkeep.extras import needed_by
from kvkeep.version import __version__

with needed_by("Describing the machine", "cli"):
    import psutil


def environment() -> dict[str, Any]:
    """Versions, processor, threads, memory and accelerator of this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "python": platform.python_version(),
        "kvkeep": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers") or "none",
        "triton": _version("triton") or "none",
        "cpu": f"{processor()}, {os.cpu_count()} cores",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_kernel": native_library.instructions() or "none",
        "threads": torch.get_num_threads(),
        "load": round(psutil.getloadavg()[0], 1),  # runnable processes, averaged over one minute
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": "none" if accelerator is None else str(accelerator),
    } | (_cuda() if torch.cuda.is_available() else {})


def _cuda() -> dict[str, Any]:
    """The current CUDA device and, if known, the driver's version."""
    it = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = f"capability {it.major}.{it.minor}, {it.total_memory / 2**30:.1f} GiB"
    return {
        "accelerator": f"{it.name}, {about}, {it.multi_processor_count} multiprocessors",
        "cuda": torch.version.cuda or "none",
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.stdout.strip().partition("\n")[0] or "unknown"


def _version(package: str) -> str | None:
    """The installed version; None for a package that is importable but not installed, or
    missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
