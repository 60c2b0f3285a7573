"""Policies, which choose the slots to evict. One file each; `base.Policy` is the contract.

To add a policy, add a line to `PARTS`, and an import for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.registry import Part, exports

if TYPE_CHECKING:
    from kvkeep.policy.adakv import AdaKV as AdaKV
    from kvkeep.policy.base import Arrivals as Arrivals
    from kvkeep.policy.base import Need as Need
    from kvkeep.policy.base import Observation as Observation
    from kvkeep.policy.base import Policy as Policy
    from kvkeep.policy.compression import Compression as Compression
    from kvkeep.policy.expected_attention import ExpectedAttention as ExpectedAttention
    from kvkeep.policy.h2o import H2O as H2O
    from kvkeep.policy.keep_all import KeepAll as KeepAll
    from kvkeep.policy.keydiff import KeyDiff as KeyDiff
    from kvkeep.policy.knorm import KNorm as KNorm
    from kvkeep.policy.kvzap import KVzap as KVzap
    from kvkeep.policy.kvzip import KVzip as KVzip
    from kvkeep.policy.pyramid import Pyramid as Pyramid
    from kvkeep.policy.qh2o import QH2O as QH2O
    from kvkeep.policy.qvlen import QVLen as QVLen
    from kvkeep.policy.random import Random as Random
    from kvkeep.policy.replay import ReplayPolicy as ReplayPolicy
    from kvkeep.policy.scored import Scored as Scored
    from kvkeep.policy.share import Share as Share
    from kvkeep.policy.snapkv import SnapKV as SnapKV
    from kvkeep.policy.tova import Tova as Tova
    from kvkeep.policy.vlen import VLen as VLen
    from kvkeep.policy.window import Window as Window
    from kvkeep.policy.wrapper import Wrapper as Wrapper

PARTS = {
    "keep_all": Part("KeepAll", "keep_all", "keep_all"),
    "window": Part("Window", "window:1024", "window:6,sinks=2"),
    "h2o": Part("H2O", "h2o:1024", "h2o:8,recent=3,sinks=1"),
    "vlen": Part("VLen", "vlen:1024", "vlen:8"),
    "qh2o": Part("QH2O", "qh2o:1024", "qh2o:8,recent=2"),
    "qvlen": Part("QVLen", "qvlen:1024", "qvlen:8,recent=2"),
    "tova": Part("Tova", "tova:1024", "tova:8"),
    "snapkv": Part("SnapKV", "snapkv:1024", "snapkv:8,window=4,pool=3"),
    "knorm": Part("KNorm", "knorm:1024", "knorm:8,recent=1"),
    "keydiff": Part("KeyDiff", "keydiff:1024", "keydiff:8"),
    "expected_attention": Part(
        "ExpectedAttention", "expected_attention:1024", "expected_attention:8,sinks=2,future=16"
    ),
    "random": Part("Random", "random:1024", "random:8"),
    "kvzip": Part("KVzip", "kvzip:25%", "kvzip:50%"),
    # Without an example for tests: it needs a scorer file, and is then `adakv` with other scores.
    "kvzap": Part("KVzap", "kvzap:25%,scorer=FILE"),
    # Without a suggestion: bash would insert the parentheses without quotes.
    "pyramid": Part("Pyramid", example="pyramid:2(h2o:8,recent=2)"),
    "adakv": Part("AdaKV", example="adakv:0.3(h2o:8,recent=2)"),
}
"""Every policy of kvkeep."""

ALIASES = {"streaming": ("window", {"sinks": 4})}
"""Other names for policies with preset options: StreamingLLM (arXiv 2309.17453) is a window with
four sinks."""

_OTHERS = {
    "base": ["Arrivals", "Need", "Observation", "Policy"],
    "scored": ["Scored"],
    "share": ["Share"],
    "wrapper": ["Wrapper"],
}

_INTERNAL = {"compression": ["Compression"], "replay": ["ReplayPolicy"]}

POLICIES: dict[str, type[Policy]]
"""Name in a spec -> class; its dataclass fields are the spec's options."""

__getattr__, __all__ = exports(globals(), "POLICIES", PARTS, _OTHERS, internal=_INTERNAL)
