"""kvkeep-lab: measures kvkeep. It adds commands to `kvkeep`: bench, eval, recommend, inspect and
calibrate.

`calibrate` makes scorer files for the policy kvzap; see `kvkeep_lab.calibration.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.registry import exports

if TYPE_CHECKING:
    from kvkeep_lab.calibration.run import calibrate as calibrate

__getattr__, __all__ = exports(globals(), "", {}, {"calibration.run": ["calibrate"]})
