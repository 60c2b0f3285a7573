"""PreparedStep: a layer's step that only waits to be made by the native library."""

from __future__ import annotations

from typing import Protocol

from kvkeep.layer.plan import BEGUN, DONE, FAILED, RUNNING, StepPlan
from kvkeep.layer.step import StepInputs

NOT_MADE = -1
RAISED = 3  # KV_STEP_RAISED of native/abi.h
_STATES = {0: DONE, FAILED: RUNNING}
"""By the KvStepResult of a call; in all other cases nothing was changed."""


def require_memory(result: int, steps: int) -> None:
    """Raise MemoryError if a call of `kv_step` failed."""
    if result == FAILED:
        raise MemoryError(f"no scratch memory for a step of {steps} sequences")


class PreparedStep(Protocol):
    """A step of one token a row: `begin`, then the call, and in any case `end`.

    All layers are prepared before the first runs: Python that has just run takes a fraction of the
    time of Python that weights have displaced from the processor's caches.

    Attributes:
        sequences: the packed KvSequences.
        count: how many there are.
        rows: how many rows they have.
        kind: the packed KvKind, which inputs it takes.
    """

    sequences: bytes
    count: int
    rows: int
    kind: bytes

    def begin(self) -> None:
        """Record the state to return to. From here to `end` the layer belongs to this thread."""

    def end(self, result: int) -> None:
        """Count the token if the step was made; otherwise return to the state before it.

        Args:
            result: a KvStepResult, or `NOT_MADE`.
        """


class Ready:
    """The step of a layer. See `PreparedStep`.

    Args:
        token: the index of the layer's first row among the tokens of the call.
        contest: a number that no other layer of the call has.
    """

    def __init__(self, plan: StepPlan, token: int = 0, contest: int = 1) -> None:
        self.plan, self._begun = plan, False
        self._place, self._entries = (token, contest), plan.cursor.turn.entries
        self.sequences, self.count = plan.sequences(*self._place), len(plan.parts)
        self.rows, self.kind = plan.out_shape[0], plan.packed_kind

    def given(self, inputs: StepInputs) -> bytes:
        """The packed KvSequences of a policy that looks at the inputs of a step."""
        self.plan.enter(inputs)
        return self.plan.sequences(*self._place)

    def begin(self) -> None:
        """See `PreparedStep`."""
        self.plan.take_turn(self._entries)
        self._begun = True

    def end(self, result: int) -> None:
        """See `PreparedStep`."""
        if self._begun:
            self._begun = False
            self.plan.end(_STATES.get(result, BEGUN))
