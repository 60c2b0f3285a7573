"""The contract of a policy, which chooses the slots that are evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.geometry import Geometry
from kvkeep.planes import OwnWindow, Planes, PlaneSpec, Reach
from kvkeep.policy.compression import Compression
from kvkeep.policy.protection import Protection
from kvkeep.policy.rule import Rule
from kvkeep.policy.share import Share
from kvkeep.renamed import Renamed, require_new_names
from kvkeep.rotary import Rotary


class Need(Enum):
    """Inputs that a policy may ask for; each costs extra computation or memory."""

    MASS = "mass"
    QUERIES = "queries"
    ENCODE_ERROR = "encode_error"
    ROTARY = "rotary"


class Arrivals(NamedTuple):
    """New tokens, as the model computed them.

    Attributes:
        keys: (B, H, n, Dk).
        values: (B, H, n, Dv).
        position: (n,) or (B, n) with -1 for padding.
        error: the norm of the encoding error, fp32 (B, H, n); None unless the policy needs it.
        rotary: the keys' rotary embedding; None if the policy does not need it or there is none.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    error: Tensor | None = None
    rotary: Rotary | None = None


class Observation(NamedTuple):
    """A policy's view of a step and of its layer.

    Args:
        mass: fp32 (B, H, S) over all slots; None if not needed.
        queries: the chunk's queries (B, Hq, n, Dk); None if the caller computed attention itself.
        position: the chunk's positions, (n,), or (B, n) with -1 for padding.
        newest: the newest position, one int for all rows, or int64 (B, 1, 1) if rows differ.
        window: the layer's own sliding window; None: no window.
        scale: the factor on q . k; None if the caller computed attention itself.
        rotary: the model's rotary embedding; None: the model has none.
        state: tensors (B, ...) that the policy keeps for each row, by name. The policy may replace
            them, but must not write to them.
        plain: number of tokens of each row and head that `victims` is not shown, because they stay.
        keys, values: functions that decode the slots of given planes to fp32 (B, H, S, D).
    """

    mass: Tensor | None = None
    queries: Tensor | None = None
    position: Tensor | None = None
    newest: int | Tensor = -1
    window: OwnWindow | None = None
    scale: float | None = None
    rotary: Rotary | None = None
    state: dict[str, Tensor] | None = None
    plain: int = 0
    keys: Callable[[Planes], Tensor] | None = None
    values: Callable[[Planes], Tensor] | None = None

    def fed(self) -> int | Tensor:
        """The number of real tokens in the chunk: n, or int64 (B, 1, 1) if rows have padding."""
        assert self.position is not None
        if self.position.dim() == 1:
            return self.position.shape[0]
        return (self.position >= 0).sum(dim=1)[:, None, None]


@cache  # never freed: CUDA graphs hold its address
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)


@dataclass(frozen=True)
class Policy:
    """Chooses the slots of a layer to evict. The dataclass fields are the options of its spec."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    rollback: ClassVar[bool] = False
    """Whether truncating the newest tokens exactly restores the state before they were fed, if no
    slots were evicted. Drafts can be removed under any policy: see `LayerCache.record_past`."""

    per_head: ClassVar[bool] = False
    """Whether heads may keep different tokens; each head then has its own positions."""

    ragged: ClassVar[bool] = False
    """Whether heads may keep different numbers of tokens. `victims` then returns a bool mask
    (B, H, S) of the slots to evict, and the budget, of which `Observation.plain` slots are not
    shown, is the average over heads."""

    counts_empty: ClassVar[bool] = False
    """Whether its evictions count empty slots, so that the layer must not free them separately. A
    wrapper does not forward it."""

    wraps: ClassVar[bool] = False
    """Whether its first field is another policy: `name:options(other)` in a spec."""

    budget_at = Renamed("at")
    protected = Renamed("protection")
    room = Renamed("most_slots")

    def __init_subclass__(cls) -> None:
        require_new_names(cls)

    # -- the budget -----------------------------------------------------------------------

    @property
    def budget(self) -> int | None:
        """The most slots kept between steps; None: all, or a share of the tokens fed."""
        return None

    @property
    def share(self) -> Share | None:
        """The budget, if it is a share of the tokens fed."""
        return None

    @property
    def evicts(self) -> bool:
        """Whether steps evict slots."""
        return self.budget is not None or self.share is not None

    def at(self, fed: int) -> Policy:
        """The policy once `fed` tokens have been fed. A budget that is a share becomes a number of
        tokens."""
        return self

    @property
    def most_slots(self) -> int | None:
        """The most slots during a step of one token: those of the budget and the new token, unless
        `reach` lets the layer free a slot before the step. None: there is no budget."""
        return None if self.budget is None else self.budget + (self.reach is None)

    def with_budget(self, tokens: int | Share) -> Policy:
        """This policy with a budget of `tokens`; raises SpecError if that is not possible."""
        raise SpecError(f"policy {self.name} has no budget to change")

    @property
    def protection(self) -> Protection:
        """The positions that are never evicted."""
        return Protection()

    def keeping(self, stop: int) -> Policy:
        """This policy with the first `stop` positions protected; a budget in tokens stays the same.
        Raises SpecError if that is not possible."""
        raise SpecError(
            f"policy {self.name} cannot be told which positions to keep; use a policy with the "
            "option keep_to, such as window:1024 or h2o:1024"
        )

    # -- the layer ------------------------------------------------------------------------

    def within(self, window: int) -> Policy:
        """The policy to use on a layer with a sliding window of `window` tokens."""
        return self

    def in_layer(self, index: int, count: int) -> Policy:
        """The policy to use in layer `index` of `count`."""
        return self

    @property
    def reach(self) -> Reach | None:
        """The positions a query may see, if the policy limits them; the layer then evicts slots
        that no later query can see."""
        return None

    # -- a step ---------------------------------------------------------------------------

    @property
    def planes(self) -> dict[str, PlaneSpec]:
        """The policy's own planes, such as scores, which the storage keeps for each slot."""
        return {}

    @property
    def step(self) -> int | None:
        """The most tokens of a step; a larger chunk is divided into steps. None: a chunk is one
        step."""
        return None

    @property
    def observed(self) -> int | None:
        """Number of a chunk's newest queries that the mass counts; None: all."""
        return None

    @property
    def shows_padding(self) -> bool:
        """Whether queries of padding attend to earlier slots. They must not if the policy needs the
        mass, because it would count them."""
        return Need.MASS not in self.needs

    def enter(self, tokens: Arrivals) -> Planes:
        """The policy's planes for new tokens, (B, H|1, n, ...); zeros by default."""
        rows, heads, n, _ = tokens.keys.shape
        device = tokens.keys.device
        return {
            name: _zero(spec.dtype, device).expand(
                rows, 1 if spec.shared else heads, n, *spec.shape
            )
            for name, spec in self.planes.items()
        }

    def observe(self, planes: Planes, seen: Observation) -> None:
        """Update the policy's own planes in place, and `seen.state`, after a step."""

    @property
    def observes(self) -> bool:
        """Whether the policy overrides `observe`."""
        return type(self).observe is not Policy.observe

    def victims(self, count: int, planes: Planes, seen: Observation) -> Tensor:
        """The `count` slots to evict, empty slots first: int64 (B, 1, count), or (B, H, count) if
        `per_head`. Never called without a budget."""
        raise NotImplementedError(f"policy {self.name} has no victims() to choose {count} slots")

    @property
    def rule(self) -> Rule | None:
        """Its decode step as data for the native library; None: it runs in Python. A class that
        overrides a method described by the rule, such as `score`, must also override the rule, or
        the rule is not used."""
        return None

    # -- files and whole texts ------------------------------------------------------------

    @property
    def compression(self) -> Compression | None:
        """How a cache of this policy is compressed once it holds a whole text; see
        `kvkeep.host.compress`. None: never."""
        return None

    @property
    def calibrated_for(self) -> str | None:
        """The model for which it was calibrated, as `kvkeep.host.fingerprint.sampled` identifies
        models; None: it fits any model."""
        return None

    @property
    def file(self) -> str | None:
        """The path of the file that the policy reads; None: no file. The file is opened in
        `in_layer` or `calibrated_for`, never when a spec is parsed: a spec may come from a saved
        cache, whose paths are replaced by `reading`."""
        return None

    def reading(self, file: str) -> Policy:
        """The policy with another path for `file`."""
        return self

    def why_not_memory(self, memory: Planes, geometry: Geometry) -> str:
        """Why `memory`, read from a file, cannot be a `seen.state` of this policy; empty if it can.

        Args:
            geometry: of the layer.
        """
        return f"policy {self.name} keeps no state {sorted(memory)}" if memory else ""


_RULED = ("enter", "observe", "score", "victims")
"""Methods that a rule describes."""


def rule_of(policy: Policy) -> Rule | None:
    """The rule of a policy; None if it has none, or if its class overrides a method that the rule
    describes."""
    kind = type(policy)
    owner = next(base for base in kind.__mro__ if "rule" in vars(base))
    same = all(getattr(kind, x, None) is getattr(owner, x, None) for x in _RULED)
    return policy.rule if same else None


def interval_of(policy: Policy) -> int:
    """The `Rule.interval` of a policy; 0 if it has no rule."""
    rule = rule_of(policy)
    return 0 if rule is None else rule.interval
