"""Preemption: move the caches of preempted answers out of memory, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

from torch import Tensor

from kvkeep.cache import Snapshot
from kvkeep.files.offload import Kept, Offload
from kvkeep.generate.answer import Answer
from kvkeep.host import Activation, ModelCache


class Preempted(NamedTuple):
    """A snapshot of a cache, with each tensor held by an `Offload`."""

    snapshot: Snapshot
    activation: Activation | None

    def tensors(self) -> Iterator[Kept]:
        """All tensors."""
        for layer in self.snapshot.layers:
            for planes in layer.parts.values():
                for name in planes:
                    one: Any = planes[name]
                    yield one
        carried: Any = self.snapshot.carried
        yield from carried.values()


@final
class Preemption:
    """Copies the caches of preempted answers to host memory or a file.

    Args:
        offload: memory used for nothing else; None: host memory.
    """

    def __init__(self, offload: Offload | None) -> None:
        self._offload = offload

    @property
    def offload(self) -> Offload:
        """The memory that holds the tensors."""
        if self._offload is None:
            self._offload = Offload()
        return self._offload

    def preempt(self, answer: Answer) -> None:
        """Copy an answer's cache away and free it. If this fails, nothing has changed."""
        cache = answer.cache
        assert cache is not None
        if not cache.fed:
            answer.begun, answer.cache = False, None
            return
        put: list[Kept] = []

        def keep(plane: Tensor) -> Kept:
            put.append(self.offload.put(plane))
            return put[-1]

        try:
            cache.mend("preempt")
            held = [layer.state() for layer in cache.layers]
            states = [state._replace(parts=_each(state.parts, keep)) for state in held]
            carried: Any = {name: keep(x) for name, x in cache.carried.tensors().items()}
        except Exception:
            for one in put:
                self.offload.drop(one)
            raise
        kinds = [layer.kind for layer in cache.layers]
        snapshot = Snapshot(kinds, states, cache.routed, carried)
        answer.preempted, answer.cache = Preempted(snapshot, cache.activation), None

    def resume(self, answer: Answer) -> None:
        """Restore an answer's cache, or give it an empty one if it has not started."""
        origin, preempted = answer.origin, answer.preempted
        cache = origin.reuse.new_cache(origin.spec)
        if preempted is not None:
            self._fill(cache, preempted)
        answer.cache, answer.preempted = cache, None
        self._free(preempted)

    def drop(self, answer: Answer) -> None:
        """Free the copy of an answer's cache, if there is one."""
        preempted, answer.preempted = answer.preempted, None
        self._free(preempted)

    def _fill(self, cache: ModelCache, preempted: Preempted) -> None:
        snapshot, get = preempted.snapshot, self.offload.get
        states = [state._replace(parts=_each(state.parts, get)) for state in snapshot.layers]
        held: Any = snapshot.carried
        carried = {name: get(x) for name, x in held.items()}
        cache.restore(snapshot._replace(layers=states, carried=carried))
        cache.activation = preempted.activation

    def _free(self, preempted: Preempted | None) -> None:
        for tensor in () if preempted is None else preempted.tensors():
            self.offload.drop(tensor)

    def retain(self, answers: Iterable[Answer]) -> None:
        """After an interrupt, free every tensor that none of the answers holds."""
        if self._offload is not None:
            found = [answer.preempted for answer in answers if answer.preempted is not None]
            self._offload.retain(tensor for one in found for tensor in one.tensors())


def _each(parts: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every plane of a layer's state."""
    return {part: {name: change(planes[name]) for name in planes} for part, planes in parts.items()}
