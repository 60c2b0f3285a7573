"""Ready: a layer's step that only waits to be made, by the native library."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from torch import Tensor

from kvkeep.layer.plan import BEGUN, DONE, FAILED, RUNNING, UNLIKE, StepPlan
from kvkeep.layer.records import SEQUENCE
from kvkeep.native_library import LIBRARY, address_of

if TYPE_CHECKING:
    from kvkeep.layer.layer import LayerCache

_CALL = Struct("=3q")


class StepCall:
    """A call of `kv_step`: the packed KvSequences and KvTokens."""

    def __init__(self, sequences: bytes, tokens: bytes) -> None:
        self._sequences, self._tokens = sequences, tokens
        self.count = len(sequences) // SEQUENCE.size

    def make(self) -> int:
        """Make it; returns a KvStepResult."""
        assert LIBRARY is not None
        return LIBRARY.kv_step(self._sequences, self.count, self._tokens)  # type: ignore[no-any-return]

    @property
    def arguments(self) -> bytes:
        """The packed arguments, which refer to memory of this object."""
        return _CALL.pack(address_of(self._sequences), self.count, address_of(self._tokens))


def require_memory(result: int, steps: int) -> None:
    """Raise MemoryError if a call of `kv_step` failed."""
    if result == FAILED:
        raise MemoryError(f"no scratch memory for a step of {steps} sequences")


class Ready:
    """A layer's step that only waits to be made: `begin`, then the call, and in any case `end`.

    Several layers can be prepared before the first runs: Python that has just run takes a fraction
    of the time of Python that weights have displaced from the processor's caches.
    """

    def __init__(
        self, layer: LayerCache, plan: StepPlan, call: StepCall, position: Tensor | None
    ) -> None:
        self._layer, self._plan, self._position = layer, plan, position
        self._state: int | None = None
        self.call = call

    def begin(self) -> None:
        """Record the state to return to. From here to `end` the layer belongs to this thread."""
        self._plan.take_turn(self._layer)
        self._state = BEGUN

    def start(self, running: bool = True) -> None:
        """Note that the caller is about to call the library, or that it did not after all."""
        self._state = RUNNING if running else BEGUN

    def finish(self, result: int) -> bool:
        """Note the result of the library; False: the step must be made by `LayerCache.run`.

        Raises:
            MemoryError: there is no scratch memory.
        """
        self.start()
        require_memory(result, 1)
        self._state = DONE if result != UNLIKE else BEGUN
        if result == UNLIKE:
            self.end()
        return result != UNLIKE

    def end(self) -> None:
        """Count the token if the step has run; otherwise return to the state before it."""
        state, self._state = self._state, None
        if state is not None:
            self._plan.end(self._layer, state, self._position)
