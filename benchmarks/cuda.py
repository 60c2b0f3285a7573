"""The measurements of benchmarks/cuda.sh, each run in a process of its own. Needs torch,
transformers and kvkeep's source, but neither kvkeep's command line nor an install.

    python benchmarks/cuda.py op --out op-cuda.json      # or append, or decode
    python benchmarks/cuda.py table op-cuda.json ...     # print a short table of results
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from kvkeep_lab.bench.options import BENCHMARKS

# The shortest and the longest first, because the time limit may cut off the last ones.
LENGTHS = (2048, 131072, 32768, 8192)

TINY: dict[str, dict[str, Any]] = {
    "op": {"lengths": (64, 128), "heads": (4,), "kv_heads": 2, "head_dim": 64, "turns": 1},
    "append": {"tokens": (16, 32), "batches": (1, 2), "turns": 1},
    "decode": {"model": "random-tiny", "contexts": (16, 32), "turns": 1},
}
FULL: dict[str, dict[str, Any]] = {
    "op": {"lengths": LENGTHS},
    "append": {},
    "decode": {"model": "random-1b", "contexts": LENGTHS},
}
EVERYTHING: dict[str, dict[str, Any]] = {  # the defaults on CUDA
    "op": {"against": ("torch-sdpa", "torch-folded", "flex")},
    "append": {"layouts": ("concat", "growing", "fixed")},
    "decode": {"ways": ("eager", "graph", "compiled"), "against": ("hf-dynamic", "hf-static")},
}
LEFT_OUT = ("skipped", "_ratio", "_update_us", "_update_device_us")  # columns not in the tables


def main() -> None:
    """Run the command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["op", "append", "decode", "table"])
    parser.add_argument("files", nargs="*", type=Path, help="JSON files for table")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    parser.add_argument("--device", help="device; default: CUDA if available, otherwise cpu")
    parser.add_argument("--seconds", type=float, help="time limit; cases not started are skipped")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    options = parser.parse_args()
    if options.name == "table":
        for file in options.files:
            say(table(json.loads(file.read_text())) if file.exists() else f"no {file.name}")
        return
    sizes = (TINY if options.tiny else FULL)[options.name] | EVERYTHING[options.name]
    # Imports of other benchmarks may fail.
    run = import_module(f"kvkeep_lab.bench.{options.name}").run
    asked = BENCHMARKS[options.name](**sizes, device=options.device, seconds=options.seconds)
    said: list[str] = []

    def progress(doing: str, share: float | None) -> None:
        if said[-1:] != [doing]:
            said.append(doing)
            say(doing)

    result = run(asked, progress)
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    say(table(result))


def table(result: dict[str, Any]) -> str:
    """A result as lines of text, followed by the reasons why cases were skipped."""
    machine = result["environment"]
    lines = [f"{result['benchmark']}: {machine['accelerator']}, torch {machine['torch']}"]
    lines += [f"{name} {value:.1f}" for name, value in result.items() if name.endswith("gb_per_s")]
    rows = result["rows"]
    columns = [name for name in (rows[0] if rows else ()) if not name.endswith(LEFT_OUT)]
    measured = [[cell(row[name]) for name in columns] for row in rows if has_figures(row)]
    widths = [max(map(len, column)) for column in zip(columns, *measured, strict=True)]
    for row in [columns, *measured]:
        lines.append(" ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    for row in rows:
        if row.get("skipped"):
            known = [str(x) for x in row.values() if x is not None and not isinstance(x, float)]
            lines.append("skipped: " + ", ".join(known))
    return "\n".join(lines)


def has_figures(row: dict[str, Any]) -> bool:
    """Whether a row has any measurement."""
    return any(isinstance(value, float) for value in row.values())


def cell(value: Any) -> str:
    """A value as text, with three significant digits."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def say(text: str) -> None:
    """Print a line and flush it, so that it is visible even if this process is killed."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
