"""Which slots stay. One file each; `base.Policy` is the contract."""

from kvkeep.policy.base import Need, Observation, Policy
from kvkeep.policy.keep_all import KeepAll
from kvkeep.policy.window import Window

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (KeepAll, Window)}
"""Name in a spec -> class; its dataclass fields are the spec's options."""

__all__ = ["POLICIES", "KeepAll", "Need", "Observation", "Policy", "Window"]
