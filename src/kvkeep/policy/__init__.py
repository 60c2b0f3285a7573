"""Policies, which choose the slots to evict. One file each; `base.Policy` is the contract."""

from kvkeep.policy.adakv import AdaKV
from kvkeep.policy.base import Arrivals, Compression, Need, Observation, Policy
from kvkeep.policy.expected_attention import ExpectedAttention
from kvkeep.policy.h2o import H2O
from kvkeep.policy.keep_all import KeepAll
from kvkeep.policy.keydiff import KeyDiff
from kvkeep.policy.knorm import KNorm
from kvkeep.policy.kvzap import KVzap
from kvkeep.policy.kvzip import KVzip
from kvkeep.policy.pyramid import Pyramid
from kvkeep.policy.qh2o import QH2O
from kvkeep.policy.qvlen import QVLen
from kvkeep.policy.random import Random
from kvkeep.policy.replay import ReplayPolicy
from kvkeep.policy.scored import Scored
from kvkeep.policy.share import Share
from kvkeep.policy.snapkv import SnapKV
from kvkeep.policy.tova import Tova
from kvkeep.policy.vlen import VLen
from kvkeep.policy.window import Window

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        KeepAll,
        Window,
        H2O,
        VLen,
        QH2O,
        QVLen,
        Tova,
        SnapKV,
        KNorm,
        KeyDiff,
        ExpectedAttention,
        Random,
        KVzip,
        KVzap,
        Pyramid,
        AdaKV,
    )
}
"""Name in a spec -> class; its dataclass fields are the spec's options."""

__all__ = [
    "H2O",
    "POLICIES",
    "QH2O",
    "AdaKV",
    "Arrivals",
    "Compression",
    "ExpectedAttention",
    "KNorm",
    "KVzap",
    "KVzip",
    "KeepAll",
    "KeyDiff",
    "Need",
    "Observation",
    "Policy",
    "Pyramid",
    "QVLen",
    "Random",
    "ReplayPolicy",
    "Scored",
    "Share",
    "SnapKV",
    "Tova",
    "VLen",
    "Window",
]
