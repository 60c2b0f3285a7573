"""Storages, which hold slots. One file each; `base.Storage` is the contract.

To add a storage, add a line to `PARTS`, and an import for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.registry import Part, exports

if TYPE_CHECKING:
    from kvkeep.storage.base import Storage as Storage
    from kvkeep.storage.concat import Concat as Concat
    from kvkeep.storage.fixed import Fixed as Fixed
    from kvkeep.storage.growing import Growing as Growing
    from kvkeep.storage.host import Host as Host
    from kvkeep.storage.split import Split as Split
    from kvkeep.storage.split import parted as parted

PARTS = {
    "growing": Part("Growing", "growing", "growing"),
    "fixed": Part("Fixed", "fixed", "fixed:16"),
    "concat": Part("Concat", "concat", "concat"),
    "host": Part("Host", "host", "host"),
}
"""Every storage of kvkeep."""

STORAGES: dict[str, type[Storage]]
"""Name in a spec -> class; its constructor's parameters are the spec's options."""

_OTHERS = {"base": ["Storage"]}

__getattr__, __all__ = exports(
    globals(), "STORAGES", PARTS, _OTHERS, internal={"split": ["Split", "parted"]}
)
