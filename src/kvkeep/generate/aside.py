"""Asides: what answers hold while others have their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

from torch import Tensor

from kvkeep.cache import Snapshot
from kvkeep.files.offload import Kept, Offload
from kvkeep.generate.answer import Answer
from kvkeep.host import Activation, ModelCache


class Aside(NamedTuple):
    """A snapshot of a cache, in which each tensor is one that an `Offload` keeps."""

    snapshot: Snapshot
    activation: Activation | None

    def kept(self) -> Iterator[Kept]:
        """All tensors."""
        for layer in self.snapshot.layers:
            for planes in layer.parts.values():
                for name in planes:
                    one: Any = planes[name]
                    yield one
        carried: Any = self.snapshot.carried
        yield from carried.values()


@final
class Asides:
    """Puts caches aside, in host memory or a file.

    Args:
        offload: used by nobody else; None: host memory.
    """

    def __init__(self, offload: Offload | None) -> None:
        self._offload = offload

    @property
    def offload(self) -> Offload:
        """Where they lie."""
        if self._offload is None:
            self._offload = Offload()
        return self._offload

    def put(self, answer: Answer) -> None:
        """Copy what an answer holds, and let it wait. If that fails, nothing has changed."""
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
            states = [
                state._replace(parts=_each(state.parts, keep))
                for state in cache.states("put aside")
            ]
            carried: Any = {name: keep(x) for name, x in cache.carried.tensors().items()}
        except Exception:
            for one in put:
                self.offload.drop(one)
            raise
        kinds = [layer.kind for layer in cache.layers]
        snapshot = Snapshot(kinds, states, cache.routed, carried)
        answer.aside, answer.cache = Aside(snapshot, cache.activation), None

    def take_back(self, answer: Answer) -> None:
        """Let an answer go on with what was put aside, or with an empty cache."""
        origin, aside = answer.origin, answer.aside
        cache = origin.reuse.new_cache(origin.spec)
        if aside is not None:
            self._fill(cache, aside)
        answer.cache, answer.aside = cache, None
        self._free(aside)

    def drop(self, answer: Answer) -> None:
        """Free what an answer had put aside, if anything."""
        aside, answer.aside = answer.aside, None
        self._free(aside)

    def _fill(self, cache: ModelCache, aside: Aside) -> None:
        snapshot, get = aside.snapshot, self.offload.get
        states = [state._replace(parts=_each(state.parts, get)) for state in snapshot.layers]
        held: Any = snapshot.carried
        carried = {name: get(x) for name, x in held.items()}
        cache.restore(snapshot._replace(layers=states, carried=carried))
        cache.activation = aside.activation

    def _free(self, aside: Aside | None) -> None:
        for one in () if aside is None else aside.kept():
            self.offload.drop(one)

    def retain(self, answers: Iterable[Answer]) -> None:
        """Count what these have put aside as all that is held, after an interrupt."""
        if self._offload is not None:
            asides = [answer.aside for answer in answers if answer.aside is not None]
            self._offload.retain(one for aside in asides for one in aside.kept())


def _each(parts: Any, change: Callable[[Any], Any]) -> Any:
    """Change every plane of a layer's state."""
    return {part: {name: change(planes[name]) for name in planes} for part, planes in parts.items()}
