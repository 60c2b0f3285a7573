"""Ready: a layer's step, packed for a call of the native library."""

from __future__ import annotations

from kvkeep.layer.cursor import State
from kvkeep.layer.decode.plan import FAILED, StepPlan
from kvkeep.layer.step import StepInputs

NOT_MADE = -1
RAISED = 3  # KV_STEP_RAISED of native/abi.h
_DONE = 0  # KvStepResult; after a result other than this and FAILED nothing has changed


def require_memory(result: int, steps: int) -> None:
    """Raise MemoryError if a call of `kv_step` failed."""
    if result == FAILED:
        raise MemoryError(f"no scratch memory for a step of {steps} sequences")


class Ready:
    """The prepared step of one token a row of a layer. Call `begin`, then the library, and always
    `end`.

    All layers are prepared before the first one runs. Reading the model's weights evicts Python's
    working set from the processor's caches, so Python between layers would run several times
    slower.

    Args:
        token: index of the layer's first row among the tokens of the call.
        contest: a number unique to this layer in the call.

    Attributes:
        sequences: packed KvSequences.
        count: number of KvSequences.
        rows: number of rows of the step.
        kind: packed KvKind of the inputs that the step accepts.
    """

    def __init__(self, plan: StepPlan, token: int = 0, contest: int = 1) -> None:
        self.plan, self._begun = plan, False
        self._place, self._entries = (token, contest), plan.cursor.turn.entries
        self.sequences, self.count = plan.sequences(*self._place), len(plan.parts)
        self.rows, self.kind = plan.out_shape[0], plan.packed_kind

    def given(self, inputs: StepInputs) -> bytes:
        """The packed KvSequences, for a policy that must see the step's inputs first."""
        self.plan.enter(inputs)
        return self.plan.sequences(*self._place)

    def begin(self) -> None:
        """Record the state before the step. This thread holds the layer's turn until `end`."""
        self.plan.take_turn(self._entries)
        self._begun = True

    def end(self, result: int) -> None:
        """Count the token if the step was made; otherwise return to the state before it.

        Args:
            result: a KvStepResult, or `NOT_MADE`.
        """
        if not self._begun:
            return
        self._begun, cursor = False, self.plan.cursor
        try:
            if result == _DONE:
                self.plan.count(cursor.turn.entries, None)
            elif result != FAILED:
                cursor.state = State.IDLE
            elif cursor.state is State.WRITING:  # if MOVING, the layer raises until it is reset
                cursor.take_back()
        finally:
            cursor.turn.__exit__(None, None, None)
