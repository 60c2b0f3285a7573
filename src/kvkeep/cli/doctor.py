"""`kvkeep doctor`: versions, devices, and usable attention backends of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvkeep.cli.output import JsonFlag, print_json, print_table, say
from kvkeep.cli.progress import Working

if TYPE_CHECKING:
    from kvkeep.choice import Box


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="First measure which calls torch computes faster than the native library, and "
            "store the result in kvkeep's directory; takes less than a minute.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show versions, threads, devices, which attention backends are usable, and which calls torch
    computes instead of the native library."""
    with Working("checking this machine") as working:
        from kvkeep import choice, native_library
        from kvkeep.attention import backends
        from kvkeep.environment import environment
        from kvkeep.threads import advised
        from kvkeep.version import TESTED

        if measure:
            from kvkeep.cli import measure as measuring

            measuring.measure(working)
        machine = environment()
        steps = advised(machine["threads"])
        rows = [
            {"backend": b.name, "usable": b.available, "about": b.reason, "limits": b.limits}
            for b in backends()
        ]
    instructions = native_library.instructions()
    faster, is_measured = choice.table(instructions), choice.is_measured(instructions)
    if json:
        report = {**machine, "threads_now": steps, "tested": TESTED, "backends": rows}
        print_json(report | {"torch_is_faster": faster, "measured": is_measured})
        return
    for name, value in machine.items():
        say(f"{name:>14}  {value}")
    say(f"{'tested with':>14}  " + ", ".join(f"{name} {range_}" for name, range_ in TESTED.items()))
    if steps < machine["threads"]:
        say(f"Other processes use some cores: generation uses {steps} threads now.")
    print_table("Attention backends, in the order they are tried", rows)
    source = "as measured" if is_measured else "by default; measure with kvkeep doctor --measure"
    choices = [
        {"operation": operation, "dtype": dtype, "torch": _shown(operation, boxes)}
        for operation, kinds in faster.items()
        for dtype, boxes in kinds.items()
    ]
    code = f"the native library's {instructions or 'missing'} code"
    print_table(f"Calls that torch computes instead of {code} ({source})", choices)


def _shown(operation: str, boxes: list[Box]) -> str:
    """The sizes of calls in words."""
    from kvkeep.choice import SIZES

    texts = []
    for box in boxes:
        parts = [
            f"{name} {max(1, low)}" + ("" if high == max(1, low) else f" to {high or 'any'}")
            for name, (low, high) in zip(SIZES[operation], box, strict=True)
            if low or high is not None
        ]
        texts.append(", ".join(parts) or "all")
    return "; ".join(texts) or "none"
