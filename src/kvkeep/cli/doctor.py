"""`kvkeep doctor`: versions, devices, and usable attention backends of this machine."""

from __future__ import annotations

from kvkeep.cli.output import JsonFlag, print_json, print_table, say
from kvkeep.cli.progress import Working


def doctor(json: JsonFlag = False) -> None:
    """Show versions, threads, devices, and which attention backends are usable."""
    with Working("checking this machine"):
        from kvkeep.attention import backends
        from kvkeep.environment import environment
        from kvkeep.threads import advised
        from kvkeep.version import TESTED

        machine = environment()
        steps = advised(machine["threads"])
        rows = [
            {"backend": b.name, "usable": b.available, "about": b.reason, "limits": b.limits}
            for b in backends()
        ]
    if json:
        print_json({**machine, "threads_now": steps, "tested": TESTED, "backends": rows})
        return
    for name, value in machine.items():
        say(f"{name:>14}  {value}")
    say(f"{'tested with':>14}  " + ", ".join(f"{name} {range_}" for name, range_ in TESTED.items()))
    if steps < machine["threads"]:
        say(f"Other processes use some cores: generation uses {steps} threads now.")
    print_table("Attention backends, in the order they are tried", rows)
