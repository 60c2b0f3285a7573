"""kvkeep's batches as systems to measure: all sequences at once, or one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvkeep.generate import Answer, Batch, SamplingParams
from kvkeep.host import ModelCache, host_of
from kvkeep.store import PrefixStore
from kvkeep.store.identity import feed
from kvkeep_lab.bench.workload import Session

_ROOM = 1.02  # of a store, for the bytes of its prefix


class BatchSession:
    """Many sequences in one `kvkeep.Batch`.

    Args:
        model: an attached model.
        prefix: first tokens of all prompts, (n,), and a cache that holds them. They lie in a store
            of the batch before the first prompt comes. The store has room for little else, so
            later tokens are not held twice. None: there is no store.
    """

    def __init__(
        self, model: Any, spec: str, prefix: tuple[Tensor, ModelCache] | None = None
    ) -> None:
        self._store = None
        if prefix is not None:
            self._store = PrefixStore(int(prefix[1].live_bytes * _ROOM))
            self._store.learn(model, *prefix)
        self._batch = Batch(model, spec=spec, store=self._store)
        self._index: dict[Answer, int] = {}

    def add(self, index: int, ids: Tensor, new: int) -> None:
        (answer,) = self._batch.add(ids, SamplingParams(new, end_tokens=frozenset()))
        self._index[answer] = index

    def step(self) -> Sequence[tuple[int, int]]:
        found = self._batch.step()
        for answer in self._index:
            if answer.error is not None:
                raise answer.error
        return [(self._index[new.answer], new.token) for new in found]

    @property
    def busy(self) -> bool:
        return bool(self._batch.running or self._batch.waiting)

    def held(self) -> int:
        caches = [answer.cache for answer in self._index if answer.cache is not None]
        stored = 0 if self._store is None else self._store.nbytes
        return stored + sum(cache.live_bytes - cache.shared_bytes for cache in caches)


class OneByOne:
    """A session that gets its prompts one after the other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[tuple[int, Tensor, int]] = deque()

    def add(self, index: int, ids: Tensor, new: int) -> None:
        self._waiting.append((index, ids, new))

    def step(self) -> Sequence[tuple[int, int]]:
        if not self._session.busy:
            self._session.add(*self._waiting.popleft())
        return self._session.step()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._session.busy

    def held(self) -> int:
        return self._session.held()


def read(model: Any, ids: Tensor, spec: str) -> tuple[Tensor, ModelCache]:
    """Token ids (n,), and a cache that holds them, as `BatchSession` takes them."""
    host = host_of(model)
    cache = host.new_cache(spec)
    feed(host, ids, cache, 256)
    return ids, cache
