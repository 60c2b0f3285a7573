"""`kvkeep doctor`: this machine's versions and devices, and which backends it can use and why."""

from __future__ import annotations

import typer

from kvkeep.cli.output import JsonFlag, print_json, print_table


def doctor(json: JsonFlag = False) -> None:
    """Show versions, threads, devices, and which attention backends are usable."""
    from kvkeep.attention import backends
    from kvkeep.bench.environment import environment

    machine = environment()
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
