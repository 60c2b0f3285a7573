"""KVKeepPress: a kvkeep spec as a press of kvpress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host import Host, ModelCache, Specs, host_of
from kvkeep.host.compress import compress, compresses, stop_evicting


class KVKeepPress:
    """A press for kvpress's pipeline: `pipe(context, question=..., press=KVKeepPress("h2o:25%"))`.

    The context is read in one forward through a cache of this spec, evicted or compressed, and each
    question is answered through a fork of the slots left: evicted slots take no memory. As
    with other presses, the question and the answer are kept, and see all that is left. The
    `DynamicCache` of the pipeline stays empty. The first use attaches the model, which stays
    attached, because questions are asked after the press was left; `kvkeep.detach` undoes it.

    Args:
        spec: of all caches, such as `kvzip:25%`, where kvpress has `KVzipPress(0.75)`.
    """

    def __init__(self, spec: Specs) -> None:
        self.spec = spec
        self._removed = 0.0
        self._contexts = WeakKeyDictionary[Any, _Context]()
        self._read: list[_Context] | None = None
        self._hook: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r})"

    @property
    def compression_ratio(self) -> float:
        """The share of the last context's slots that were removed; 0 before the first context.

        kvpress's `evaluate.py` sets the ratio of its command line, and records the value after each
        context. Setting it changes nothing, because the spec has the budget.
        """
        return self._removed

    @compression_ratio.setter
    def compression_ratio(self, ratio: float) -> None:
        pass

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """While the context is read.

        Raises:
            SpecError: the spec does not exist or does not fit the model.
            UnsupportedError: kvkeep does not support the model.
        """
        host = host_of(model)
        host.new_cache(self.spec)
        if not host.attached:
            host.attach(self.spec)
        if self._hook is not None:
            self._hook.remove()

        def enter(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, kwargs | self._replaced(host, args, kwargs)

        # Before kvkeep's own hook, which sees kvkeep's cache.
        self._hook = model.model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        self._read = read = list[_Context]()
        try:
            yield
        finally:
            self._read = None
        for context in read:
            self._removed = 1 - context.end()

    def cache(self, given: Any) -> ModelCache:
        """A fork of the context that was read into a cache of transformers.

        Raises:
            KeyError: no context was.
        """
        return self._contexts[given].fork()

    def _replaced(
        self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The argument of a forward that is a cache of transformers, with kvkeep's in its place."""
        caches = {
            name: x
            for name, x in kwargs.items()
            if isinstance(x, transformers.Cache) and not isinstance(x, ModelCache)
        }
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            return {}
        for name, given in caches.items():
            if self._read is not None and given not in self._contexts:
                if len(given) and given.get_seq_length():
                    raise UnsupportedError(
                        f"a press reads a context into an empty cache, but this "
                        f"{type(given).__name__} holds {given.get_seq_length()} tokens; give a new "
                        "DynamicCache"
                    )
                self._contexts[given] = context = _Context(host, host.new_cache(self.spec))
                self._read.append(context)
            if given in self._contexts:
                return {name: self._contexts[given].next(ids, kwargs.get("position_ids"))}
        return {}


class _Context:
    """A context's cache, and that of the question that is being answered."""

    def __init__(self, host: Host, cache: ModelCache) -> None:
        self._host, self._cache = host, cache
        self._ids: list[Tensor] = []
        self._frozen: Any = None

    def next(self, ids: Tensor, position: Tensor | None) -> ModelCache:
        """The cache of the next forward: a new fork if its tokens follow the context."""
        if self._frozen is None:
            self._ids.append(ids)
        elif position is not None and int(position.flatten()[0]) == self._tokens:
            self._cache = self.fork()
        return self._cache

    def fork(self) -> ModelCache:
        """What is left of the context."""
        forked: ModelCache = self._frozen.fork()
        return forked

    def end(self) -> float:
        """The context was read. Returns the share of its slots that are kept."""
        if compresses(self._cache):
            compress(self._host, self._cache, torch.cat(self._ids, dim=1))
        stop_evicting(self._cache)
        self._tokens = self._cache.fed
        kept = self._cache.stats().kept
        self._frozen = self._cache.freeze()
        return kept
