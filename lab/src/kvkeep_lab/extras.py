"""Optional packages of kvkeep-lab, as `kvkeep.extras` has for kvkeep."""

from __future__ import annotations

from functools import partial

from kvkeep import extras

needed_by = partial(extras.needed_by, package="kvkeep-lab")
