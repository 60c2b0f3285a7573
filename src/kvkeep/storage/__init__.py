"""Storages, which hold slots. One file each; `base.Storage` is the contract."""

from kvkeep.storage.base import Storage
from kvkeep.storage.concat import Concat
from kvkeep.storage.fixed import Fixed
from kvkeep.storage.growing import Growing
from kvkeep.storage.host import Host
from kvkeep.storage.split import Split, parted

STORAGES: dict[str, type[Storage]] = {s.name: s for s in (Growing, Fixed, Concat, Host)}
"""Name in a spec -> class; its constructor's parameters are the spec's options."""

__all__ = ["STORAGES", "Concat", "Fixed", "Growing", "Host", "Split", "Storage", "parted"]
