"""InOneCall: the part of `LayerCache` that makes a step of one token a row by one native call."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvkeep.layer.history import History
from kvkeep.layer.native_heads import HeadsStep, ReadyHeads
from kvkeep.layer.native_step import SEQUENCE, NativeStep, ReadyStep
from kvkeep.layer.slots import LayerSlots
from kvkeep.layer.step import StepInputs
from kvkeep.layer.turn import Turn
from kvkeep.planes import hides_chunks, limits
from kvkeep.policy import Policy

_MOST = 2**62  # slots, where a policy has no budget


def settles_alone(policy: Policy) -> bool:
    """Whether a decode step under this policy changes no slots but its own and those that the reach
    has passed."""
    reach = policy.reach
    bounded = reach is not None and policy.budget == reach.size + reach.fixed
    looks_on = policy.observes or policy.needs or policy.planes
    return (not policy.evicts or bounded) and not looks_on


class InOneCall(ABC):
    """The part of `LayerCache` that makes a step of one token a row by one native call."""

    policy: Policy
    window: int | None
    chunked: bool
    evicted: list[Tensor] | None
    turn: Turn
    unread: int
    _slots: LayerSlots
    _history: History
    _begun: tuple[History, tuple[int, ...]] | None
    _chunk: Tensor | None
    _writing: bool
    _moving: bool
    _settles_alone: bool
    _native: NativeStep | HeadsStep | None
    _next: ReadyStep | None  # the step that follows the last one, if it is known

    @property
    @abstractmethod
    def reachable(self) -> int:
        """How many of the slots in use the next query can reach."""

    @abstractmethod
    def _take_back(self) -> None:
        """Remove the tokens that an unfinished step wrote."""

    @property
    @abstractmethod
    def slots(self) -> LayerSlots:
        """What holds the slots."""

    def prepare(
        self, inputs: StepInputs, out: Tensor | None = None
    ) -> ReadyStep | ReadyHeads | None:
        """Check and pack a step of one token a row; None, with nothing changed, if it must be made
        by `LayerCache.run`.

        Args:
            out: contiguous (B, Hq, 1, Dv), for the result, where the same inputs come in every
                step; None: a new tensor.
        """
        native, step = self._native, self._following()
        if isinstance(native, HeadsStep):
            free = out is None and not self._unsettled
            return native.ready(self, self._history, inputs) if free else None
        if native is None or step is None or not native.takes(inputs):
            return None
        if out is None:
            out = native.new_out(inputs)
        else:
            native.repeated = inputs
        token = native.token(inputs, out, step)
        if token is None:
            return None
        step.layer, step.token, step.position, step.out = self, token, inputs.position, out
        return step

    def prepare_packed(self, index: int) -> ReadyStep | None:
        """Like `prepare`, for the token with that index in a packed forward, whose inputs must be
        of the kind that `ReadyStep.kind` says."""
        step = self._following()
        if step is not None:
            place = step.column, step.held, step.drops
            step.layer, step.position = self, None
            step.token = SEQUENCE.pack(*step.native.records, index, *place)
        return step

    @property
    def untouched(self) -> bool:
        """Whether nothing has happened since a step after which there is room for one token."""
        following = self._next
        return following is not None and following.follows(self.turn) and not self.unread

    def _following(self) -> ReadyStep | None:
        """The next step of one token a row, without its token; None if the library cannot make
        it."""
        native, history, slots = self._native, self._history, self._slots
        if native is None or isinstance(native, HeadsStep):
            return None
        following = self._next
        if following is not None and following.follows(self.turn):
            return following if native.threads == torch.get_num_threads() else None
        if self._unsettled:
            return None
        if not (self._settles_alone and native.holds(slots, history.geometry)):
            return None
        held, columns = slots.storage.length, history.columns
        length = native.frozen + held
        if length != slots.length or (length != columns and not (history.floor or history.joined)):
            return None
        drops, reach = 0, self.policy.reach
        if reach is not None or self.window is not None:
            drops = length - self.reachable
            if drops > 1 or (drops and (native.frozen or self.evicted is not None)):
                return None
            after = (1, length + 1 - drops, columns + 1)
            if limits(reach, self.window, *after, chunked=self.chunked):
                return None
            if self.chunked and hides_chunks(reach, self.window or 0, *after):
                return None
        if held - drops >= native.capacity or length - drops >= (self.policy.budget or _MOST):
            return None
        return ReadyStep(self, native, columns, length, held, drops > 0)

    @property
    def _unsettled(self) -> bool:
        """Whether a change was interrupted, or rows have had padding."""
        return self._moving or self._writing or self._history.pads is not None

    def _describe(self, inputs: StepInputs) -> None:
        """Prepare `prepare` for steps like the one just made."""
        history, self._next = self._history, None
        if history.pads is None:
            if self.policy.ragged:
                self._native = HeadsStep.of(self._slots, history.geometry, inputs)
                return
            self._native = NativeStep.of(
                self._slots,
                history.geometry,
                self.policy.reach,
                self.window,
                inputs,
                self.chunked,
            )
