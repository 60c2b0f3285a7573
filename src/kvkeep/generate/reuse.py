"""Reuse: what the answers of a batch take from a prefix store, and what they leave there."""

from __future__ import annotations

import logging
from typing import Any, final

from kvkeep.errors import UnsupportedError
from kvkeep.generate.answer import Answer, Prompt
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compresses, read
from kvkeep.store.prefix import PrefixStore

_LOG = logging.getLogger("kvkeep.generate")


class Reuse:
    """Begins the caches of answers, from a store where there is one. A store that refuses a prompt,
    or fails, costs the answer nothing but time.

    Args:
        model: of the answers.
        store: None: every prompt is computed.
    """

    given: ModelCache | None = None
    """The cache of a prompt's only answer, if its owner keeps it."""

    def __init__(self, model: Any, store: PrefixStore | None) -> None:
        self._model, self._host, self._store = model, host_of(model), store

    def new_cache(self, spec: Specs) -> ModelCache:
        """A cache for an answer: empty, or that which its owner gave."""
        return self._host.new_cache(spec) if self.given is None else self.given

    def stores(self, origin: Prompt) -> bool:
        """Whether a prompt is to be stored."""
        return self._store is not None and origin.namespace is not None

    def ready(self, answer: Answer, *, ask: bool) -> bool:
        """Whether `begin` need not wait for the store's backend. Otherwise a thread of the store
        asks it meanwhile, from now on if it may `ask`."""
        origin = answer.origin
        if self._store is None or origin.namespace is None:
            return True
        if origin.fetched is None and ask:
            try:
                origin.fetched = self._store.fetch(self._model, **self._asked(answer))
            except Exception as error:
                self._give_up(answer, error)
                return True
        return origin.fetched is not None and origin.fetched.done()

    def _asked(self, answer: Answer) -> dict[str, Any]:
        ids, origin = answer.prompt, answer.origin
        about = {"spec": origin.spec, "namespace": origin.namespace}
        return {"tokens": ids[:-1], "prompt": ids, **about}

    def begin(self, answer: Answer) -> ModelCache:
        """A cache for an answer, which holds the beginning of its prompt if that is stored. Sets
        `answer.cached`. It waits for no backend, see `ready`.

        Raises:
            UnsupportedError: other adapters are active beside an activated one.
        """
        ids, origin = answer.prompt, answer.origin
        if self._store is not None and origin.namespace is not None:
            try:
                if origin.fetched is not None:
                    origin.fetched.result()
                found = self._store.find(self._model, **self._asked(answer), fetch=False)
                cache, answer.cached = found
                return cache
            except Exception as error:
                self._give_up(answer, error)
        cache = self.new_cache(origin.spec)
        cache.activation = self._host.activation_in(ids)
        return cache

    def mark(self, answer: Answer) -> None:
        """Copy the states of recurrent layers, at a point where stored prompts may end."""
        if answer.cache is not None and self.stores(answer.origin):
            answer.cache.mark()

    def keep(self, answer: Answer) -> None:
        """Store what an answer's cache was fed. A thread of the store writes it to the backend."""
        namespace, cache = answer.origin.namespace, answer.cache
        if self._store is None or namespace is None or cache is None or cache.fed <= answer.cached:
            return
        try:
            ids = answer.ids[: cache.fed]
            self._store.learn(self._model, ids, cache, namespace=namespace, wait=False)
        except Exception as error:
            self._give_up(answer, error)
        finally:
            cache.carried.unmark()

    def flush(self) -> None:
        """Wait until the store's backend has what was stored."""
        if self._store is not None:
            self._store.flush()

    def _give_up(self, answer: Answer, error: Exception) -> None:
        answer.origin.namespace = None
        if isinstance(error, UnsupportedError):  # its spec or model, not a fault
            _LOG.info("a prompt is computed without the store: %s", error)
        else:
            _LOG.warning("the store failed, so a prompt does without it", exc_info=error)


@final
class Given(Reuse):
    """Gives the only answer to a prompt a cache that its owner keeps.

    Args:
        cache: holds the first tokens of the prompt, or nothing. With the policy `kvzip`, the prompt
            but its last token is compressed.
        chunk: the prompt is read in chunks of this many tokens before it is compressed; None: at
            once.
    """

    def __init__(self, model: Any, cache: ModelCache, chunk: int | None = None) -> None:
        super().__init__(model, None)
        self.given, self._chunk = cache, chunk

    def begin(self, answer: Answer) -> ModelCache:
        cache, ids = self.new_cache(answer.origin.spec), answer.prompt
        activation = self._host.activation_in(ids)
        if not cache.fed or (
            cache.activation is not None
            and activation is not None
            and activation.start >= cache.fed
        ):
            cache.activation = activation
        if compresses(cache) and len(ids) > 1:
            read(self._host, cache, ids[None, :-1].to(self._host.device), self._chunk)
        return cache
