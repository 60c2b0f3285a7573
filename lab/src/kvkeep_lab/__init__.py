"""kvkeep-lab: measures kvkeep. It adds commands to `kvkeep`: bench, eval, recommend, inspect and
calibrate.

`calibrate` makes scorer files for the policy kvzap; see `kvkeep_lab.calibration.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep_lab.calibration.run import calibrate as calibrate

__all__ = ["calibrate"]


def __getattr__(name: str) -> Any:
    if name != "calibrate":
        raise AttributeError(f"module 'kvkeep_lab' has no attribute {name!r}")
    from kvkeep_lab.calibration.run import calibrate  # noqa: PLC0415 - imports torch

    return calibrate
