"""`kvkeep doctor`: what this machine offers, and what it does not and why."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import typer

from kvkeep.cli.output import JsonFlag, print_json, print_table


def doctor(json: JsonFlag = False) -> None:
    """Show versions, threads, devices, and which attention backends are usable."""
    import psutil
    import torch

    from kvkeep.attention import backends

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    machine = {
        "python": platform.python_version(),
        "kvkeep": version("kvkeep"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": "none" if accelerator is None else str(accelerator),
    }
    rows = [
        {"backend": b.name, "usable": b.available, "about": b.reason, "limits": b.limits}
        for b in backends()
    ]
    if json:
        print_json({**machine, "backends": rows})
        return
    for name, value in machine.items():
        typer.echo(f"{name:>14}  {value}")
    print_table("Attention backends, in the order they are tried", rows)
