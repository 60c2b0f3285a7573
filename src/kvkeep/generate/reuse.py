"""Reuse: start the answers of a batch from a prefix store, and store their prompts and texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol, final

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compresses, read
from kvkeep.store.prefix import PrefixStore

_LOG = logging.getLogger("kvkeep.generate")


class Origin(Protocol):
    """A prompt, see `kvkeep.generate.answer.Prompt`."""

    spec: Specs
    namespace: str | None
    fetched: Future[None] | None


class Reusing(Protocol):
    """An answer, see `kvkeep.generate.answer.Answer`."""

    cache: ModelCache | None
    cached: int

    @property
    def origin(self) -> Origin:
        """Its prompt."""

    @property
    def prompt(self) -> Tensor:
        """Token ids of its prompt, int64 (n,)."""

    @property
    def ids(self) -> Tensor:
        """Token ids of its prompt and of its own tokens, int64 (n,)."""


class Reuse:
    """Starts the caches of answers from a store. If the store fails or refuses a prompt, the prompt
    is computed.

    Args:
        model: the model of the answers.
        store: None: compute every prompt.
    """

    given: ModelCache | None = None
    """The caller's cache for the only answer to a prompt."""
    media: Mapping[str, Tensor] = {}
    """Model inputs of a prompt besides its token ids; see `Host.read`."""

    def __init__(self, model: Any, store: PrefixStore | None) -> None:
        self._model, self._host, self._store = model, host_of(model), store

    def new_cache(self, spec: Specs) -> ModelCache:
        """A cache for an answer: empty, or the caller's."""
        return self._host.new_cache(spec) if self.given is None else self.given

    def stores(self, origin: Origin) -> bool:
        """Whether a prompt will be stored."""
        return self._store is not None and origin.namespace is not None

    def ready(self, answer: Reusing, *, ask: bool) -> bool:
        """Whether `begin` can run without waiting for the store's backend. If not, and if `ask`, a
        thread of the store starts the request to the backend."""
        origin = answer.origin
        if self._store is None or origin.namespace is None:
            return True
        if origin.fetched is None and ask:
            try:
                origin.fetched = self._store.fetch(self._model, **self._query(answer))
            except Exception as error:
                self._give_up(answer, error)
                return True
        return origin.fetched is not None and origin.fetched.done()

    def _query(self, answer: Reusing) -> dict[str, Any]:
        ids, origin = answer.prompt, answer.origin
        place = {"spec": origin.spec, "namespace": origin.namespace}
        return {"tokens": ids[:-1], "prompt": ids, **place}

    def begin(self, answer: Reusing) -> ModelCache:
        """A cache for an answer, with the stored prefix of its prompt. Sets `answer.cached`. It
        does not wait for a backend; see `ready`.

        Raises:
            UnsupportedError: other adapters are active beside an activated adapter.
        """
        ids, origin = answer.prompt, answer.origin
        if self._store is not None and origin.namespace is not None:
            try:
                if origin.fetched is not None:
                    origin.fetched.result()
                found = self._store.find(self._model, **self._query(answer), fetch=False)
                cache, answer.cached = found
                return cache
            except Exception as error:
                self._give_up(answer, error)
        cache = self.new_cache(origin.spec)
        cache.activation = self._host.activation_in(ids)
        return cache

    def mark(self, answer: Reusing) -> None:
        """Copy the recurrent states at a point where a stored prompt may end."""
        if answer.cache is not None and self.stores(answer.origin):
            answer.cache.mark()

    def keep(self, answer: Reusing) -> None:
        """Store the tokens in an answer's cache. A thread of the store writes to the backend."""
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
        """Wait until the store's backend has received everything."""
        if self._store is not None:
            self._store.flush()

    def _give_up(self, answer: Reusing, error: Exception) -> None:
        answer.origin.namespace = None
        if isinstance(error, UnsupportedError):  # expected for some specs and models
            _LOG.info("a prompt is computed without the store: %s", error)
        else:
            _LOG.warning("the store failed; a prompt is computed without it", exc_info=error)


@final
class WithMedia(Reuse):
    """Starts the answers to a prompt with images, without a store.

    Args:
        media: further arguments of the model's forward for the prompt, as its processor makes them.
    """

    def __init__(self, model: Any, media: Mapping[str, Tensor]) -> None:
        super().__init__(model, None)
        self.media = media


@final
class Given(Reuse):
    """Starts the only answer to a prompt with the caller's cache.

    Args:
        cache: holds the first tokens of the prompt, or nothing. With the policy `kvzip`, the prompt
            except its last token is compressed.
        chunk: tokens read at once before compression; None: the whole prompt.
    """

    def __init__(self, model: Any, cache: ModelCache, chunk: int | None = None) -> None:
        super().__init__(model, None)
        self.given, self._chunk = cache, chunk

    def begin(self, answer: Reusing) -> ModelCache:
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
