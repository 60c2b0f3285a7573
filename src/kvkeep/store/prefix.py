"""PrefixStore: keys and values of prompts, shared by later prompts with the same beginning."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

from torch import Tensor

from kvkeep.arguments import suggests
from kvkeep.cache import note_tokens
from kvkeep.errors import ShapeError, SpecError, UnsupportedError
from kvkeep.host import Host, ModelCache, Specs, host_of, per_layer
from kvkeep.host.compress import compress, compressed_tokens, compresses
from kvkeep.host.hooks import foreign_hooks
from kvkeep.spec import CacheSpec
from kvkeep.store.backend import Backend
from kvkeep.store.beginning import (
    begin,
    beginning_of,
    begun,
    encodes_alike,
    exact_specs,
    observed_again,
    settle,
)
from kvkeep.store.compressed import Compressed
from kvkeep.store.geometry import FindGeometry, ModelGeometry
from kvkeep.store.identity import (
    Keyed,
    feed,
    flat,
    geometry_of,
    keyed,
    require_reusable,
    require_steady,
)
from kvkeep.store.stats import StoredNode
from kvkeep.store.text_store import TextStore
from kvkeep.store.tree import Node, common

_SHORTEST = 16  # fewest common tokens of a batch that are worth a separate forward


class Reading(NamedTuple):
    """A cache of tokens, and how many of them came from a store."""

    cache: ModelCache
    found: int


class _Options(TypedDict, total=False):
    spec: Specs
    namespace: str
    capacity: int | None


class FindOptions(_Options, total=False):
    """Which stored text is found; see `PrefixStore.find`."""

    prompt: Tensor | None
    whole_text: bool


class ReadOptions(_Options, total=False):
    """How a store reads a text; see `PrefixStore.read`."""

    chunk: int | None
    priority: int


class PrefixStore(TextStore):
    """Keys and values of prompts. Prompts with the same beginning share its slots.

    Its methods take a model and token ids, and derive the identity from the model and the cache's
    codecs. Threads may share a store.

    A text compressed by policy `kvzip` is one entry, whose identity includes the compression.
    Prompts that begin with the whole text find it.

    Args:
        budget: most bytes held; None: no limit. When it is reached, entries are evicted: the
            lowest priority first, then the least recently used. Locked entries and prefixes of
            other entries stay.
        backend: where blocks are also written, outside of this process; see
            `kvkeep.store.open_store`.
        block: tokens per block of the backend.

    Raises:
        SpecError: a budget or a block size below 1.
    """

    @suggests()
    def __init__(
        self, budget: int | None = None, *, backend: Backend | None = None, block: int = 256
    ) -> None:
        super().__init__(budget, backend, block)

    def prefill(self, model: Any, tokens: Tensor, **options: Unpack[ReadOptions]) -> ModelCache:
        """`read` all tokens except the last, which `generate` or your own loop feeds.

        Args:
            tokens: the prompt, int64 (n,) or (1, n).
            options: `spec`, `namespace`, `chunk`, `capacity` and `priority`, as of `read`.

        Raises:
            ShapeError: no tokens.
            UnsupportedError: slots of this spec or model cannot be shared with other prompts.
        """
        tokens = flat(tokens)
        if not len(tokens):
            raise ShapeError("a prompt without tokens; give at least one")
        return self.read(model, tokens[:-1], prompt=tokens, **options).cache

    def prefill_rows(
        self, model: Any, prompts: Sequence[Tensor], **options: Unpack[ReadOptions]
    ) -> ModelCache | None:
        """A cache with a row for each prompt, which holds the common beginning of all prompts
        (without any prompt's last token). The beginning is read once, see `read`, and shared by the
        rows. None if it has fewer than 16 tokens, or does not fit in the store.

        For a policy that needs queries, the beginning is shorter by the tokens whose queries it
        observes, or by 64 if it observes all.

        Args:
            prompts: int64 (n,) each.
            options: `spec`, `namespace`, `chunk` and `capacity`, as of `read`.

        Raises:
            ShapeError: no prompts, or an empty prompt.
            UnsupportedError: slots of this spec or model cannot be shared with other prompts.
        """
        host, prompts = host_of(model), list(map(flat, prompts))
        if not prompts or not min(map(len, prompts)):
            raise ShapeError(
                f"prompts of {list(map(len, prompts))} tokens; give prompts of at least one token"
            )
        cache = host.new_cache(options.get("spec", "keep_all"), capacity=options.get("capacity"))
        if compresses(cache):
            raise UnsupportedError("kvzip compresses one text; read each prompt by itself")
        if any(host.activation_in(prompt) is not None for prompt in prompts):
            raise UnsupportedError(
                "an activated adapter starts at a different token in each prompt; read each prompt "
                "by itself"
            )
        exact = exact_specs(cache.specs)
        most = min(map(len, prompts)) - max(1, observed_again(cache))
        shared = min(most, *(common(prompts[0], one) for one in prompts))
        tokens = prompts[0][: max(0, shared)]
        options["spec"] = exact
        if len(tokens) < _SHORTEST or not self.has_room(
            host, exact, tokens, options.get("namespace", "")
        ):
            return None
        cache = begun(cache, self.read(model, tokens, **options).cache)
        cache.freeze()
        cache.repeat(len(prompts))
        return cache

    def has_room(
        self, host: Host, specs: Sequence[CacheSpec], tokens: Tensor, namespace: str = ""
    ) -> bool:
        """Whether a text, int64 (n,), fits in the budget of an empty store.

        Raises:
            UnsupportedError: slots of this model cannot be shared with other prompts.
        """
        if self.budget is None or not len(tokens):
            return True
        require_steady(host)
        identity = keyed(host, tokens, specs, namespace).identity
        probed = partial(geometry_of, host, host.new_cache(specs), tokens)
        geometry = self._entries.geometry(identity, probed)
        states = geometry.state_bytes * -(-len(tokens) // self.block)
        return geometry.text_bytes(len(tokens)) + states <= self.budget

    def read(
        self,
        model: Any,
        tokens: Tensor,
        *,
        chunk: int | None = None,
        priority: int = 0,
        **options: Unpack[FindOptions],
    ) -> Reading:
        """A cache of tokens. The stored prefix is shared; the rest is computed and stored.

        With policy `kvzip`, all tokens are compressed and stored as one text. But if the store
        holds a compressed text that is a prefix of at least half of the tokens, the rest is
        computed, and neither compressed nor stored.

        A cache with a budget, with a codec that encodes blocks of tokens, or in host storage begins
        with exact slots of `keep_all`; missing exact slots are computed and stored, unless they do
        not fit in the store. Then the last tokens are fed to the cache, if its policy needs their
        queries, and the cache evicts. Which slots it keeps does not depend on the store's contents.

        Args:
            model: a model of a library that kvkeep knows; see `kvkeep.host.host_of`.
            tokens: int64 (n,) or (1, n).
            chunk: tokens computed at once; None: all.
            priority: see `insert`.
            options: `prompt`, `spec`, `namespace`, `capacity` and `whole_text`, as of `find`.

        Raises:
            UnsupportedError: slots of this spec or model cannot be shared with other prompts.
        """
        host, tokens = host_of(model), flat(tokens)
        spec, namespace = options.get("spec", "keep_all"), options.get("namespace", "")
        specs = per_layer(spec, host.kinds)
        if exact_specs(specs) != specs:
            return self._read_exactly(host, tokens, chunk, priority, options)
        cache, found = self.find(model, tokens, **options)
        if compresses(cache):
            feed(host, tokens[cache.fed :], cache, chunk)
            if len(tokens):
                compress(host, cache, tokens)
                self._add_compressed(host, tokens, cache, namespace, priority)
            return Reading(cache, found)
        text = keyed(host, tokens, cache.specs, namespace, cache.activation)
        with self._entries.hit(*text) as hit:
            border = hit.border
        # Windows are also stored where the text departs from stored texts.
        for stop in (border, len(tokens)):
            if cache.fed < stop <= len(tokens):
                feed(host, tokens[cache.fed : stop], cache, chunk, block=self.block)
                self.offer(text.identity, text.keys[:stop], cache, priority=priority)
        cache.carried.unmark()  # the store has these states now
        return Reading(cache, found)

    def _read_exactly(
        self,
        host: Host,
        tokens: Tensor,
        chunk: int | None,
        priority: int,
        options: FindOptions,
    ) -> Reading:
        """Read tokens into a cache that begins with exact slots; see `exact_specs`.

        Missing exact slots are computed and stored. If they do not fit in the store, the missing
        tokens are fed to the cache directly.
        """
        cache = host.new_cache(options.get("spec", "keep_all"), capacity=options.get("capacity"))
        exact, known = beginning_of(cache, tokens)
        prompt, namespace = options.get("prompt"), options.get("namespace", "")
        whole = tokens if prompt is None else prompt
        own: FindOptions = {"prompt": whole, "namespace": namespace, "spec": exact}
        if self.has_room(host, exact, known, namespace):
            text, found = self.read(host.model, known, chunk=chunk, priority=priority, **own)
        else:
            text, found = self.find(host.model, known, **own)
        begin(cache, text)
        feed(host, tokens[cache.fed :], cache, chunk and max(chunk, observed_again(cache)))
        settle(cache)
        return Reading(cache, found)

    def find(
        self,
        model: Any,
        tokens: Tensor,
        *,
        prompt: Tensor | None = None,
        spec: Specs = "keep_all",
        namespace: str = "",
        capacity: int | None = None,
        whole_text: bool = False,
        fetch: bool = True,
    ) -> Reading:
        """A cache of the stored prefix of tokens, which may be empty: `read` without computing the
        rest. A cache with a budget evicts after the next forward.

        Args:
            model, tokens: see `read`.
            prompt: the whole prompt that begins with `tokens`; None: `tokens`. An activated adapter
                computes from its last invocation in the prompt on.
            spec: the cache's spec. Caches that keep all have entries for each codec.
            namespace: only entries of the same namespace are found.
            capacity: see `kvkeep.Cache`.
            whole_text: use a compressed text only if it has all tokens.
            fetch: copy missing slots from the backend first; see `fetch`.

        Raises:
            UnsupportedError: slots of this spec or model cannot be shared with other prompts.
        """
        host, tokens = host_of(model), flat(tokens)
        cache = host.new_cache(spec, capacity=capacity)
        whole = tokens if prompt is None else flat(prompt)
        exact, known = beginning_of(cache, tokens)
        if exact != cache.specs:
            own: FindOptions = {"prompt": whole, "namespace": namespace, "spec": exact}
            text = self.find(model, known, fetch=fetch, **own)
            begin(cache, text.cache)
            return Reading(cache, text.found)
        identity, keys = self._keyed(host, tokens, whole, cache, namespace)
        probed = partial(geometry_of, host, cache, tokens)
        if compresses(cache):
            self._fill_compressed(identity, tokens, cache, whole_text, probed)
        else:
            if fetch:
                self._fetch(identity, keys, probed)
            with self._counted(identity, keys) as hit:
                if hit.fits(cache):
                    hit.fill(cache)
        note_tokens(cache, tokens[None, : cache.fed])
        return Reading(cache, cache.fed)

    def fetch(
        self,
        model: Any,
        tokens: Tensor,
        *,
        prompt: Tensor | None = None,
        spec: Specs = "keep_all",
        namespace: str = "",
    ) -> Future[None]:
        """Begin to copy slots of tokens from the backend, in a thread of the store. Afterwards
        `find`, with the same arguments and `fetch=False`, finds them without the backend.

        Raises:
            UnsupportedError: slots of this spec or model cannot be shared with other prompts.
        """
        done = Future[None]()
        done.set_result(None)
        if self._exchange is None:
            return done
        host, tokens = host_of(model), flat(tokens)
        whole = tokens if prompt is None else flat(prompt)
        exact, tokens = beginning_of(host.new_cache(spec), tokens)
        cache = host.new_cache(exact)
        identity, keys = self._keyed(host, tokens, whole, cache, namespace)
        with self._entries.hit(identity, keys) as hit:
            if hit.length == len(keys) or compresses(cache):
                return done
        geometry = self._entries.geometry(identity, partial(geometry_of, host, cache, tokens))
        return self._exchange.begin_fetch(identity, keys, geometry)

    def _keyed(
        self, host: Host, tokens: Tensor, whole: Tensor, cache: ModelCache, namespace: str
    ) -> Keyed:
        """The identity and keys of tokens. Sets the cache's activated adapter, which depends on the
        whole prompt.

        Raises:
            UnsupportedError: slots of this cache cannot be shared with other prompts.
        """
        cache.activation = host.activation_in(whole)
        require_reusable(host, cache, outside=self.backend is not None)
        return keyed(host, tokens, cache.specs, namespace, cache.activation)

    def learn(
        self,
        model: Any,
        tokens: Tensor,
        cache: ModelCache,
        *,
        namespace: str = "",
        priority: int = 0,
        wait: bool = True,
    ) -> int:
        """Store all tokens of a model's cache, such as a prompt and its answer. A cache that has
        evicted tokens, or of a model with hooks of its user, is refused. A compressed cache is
        neither stored nor counted as refused. If an activated adapter is active, the cache must
        come from `read` or `prefill`.

        Args:
            tokens: all tokens that were fed, int64 (n,).
            wait: see `insert`.

        Returns:
            How many of the tokens are stored.
        """
        if compressed_tokens(cache):
            return 0
        host, tokens = host_of(model), flat(tokens)
        active, before = host.activation_in(tokens), cache.activation
        # It is unknown which tokens another adapter computed.
        unknown = active is not None and (before is None or before.adapter != active.adapter)
        alike = encodes_alike(cache.specs, exact_specs(cache.specs))  # exact slots are plain
        if unknown or not alike or foreign_hooks(host.model):
            self._refused += 1
            return 0
        text = keyed(host, tokens, cache.specs, namespace, cache.activation)
        if len(tokens) == cache.fed:
            cache.mark()
        kept = self.offer(*text, cache, priority=priority, wait=wait)
        cache.carried.unmark()  # the store has these states now
        return kept

    def outline(
        self,
        model: Any,
        tokens: Tensor,
        *,
        spec: Specs = "keep_all",
        namespace: str = "",
        most: int = 256,
    ) -> list[StoredNode]:
        """The tree of prefixes in which `find` looks for tokens, without the tokens of other texts:
        the root and at most `most` other nodes, parents first. Nodes of the longest stored prefix
        of `tokens` take precedence, then the most recently used. No node is marked as used.

        Args:
            tokens: int64 (n,).
            spec, namespace: see `read`.

        Raises:
            SpecError: `most` is below 1.
        """
        if most < 1:
            raise SpecError(f"an outline of at most {most} nodes; give at least 1")
        host, tokens = host_of(model), flat(tokens)
        specs = per_layer(spec, host.kinds)
        text = keyed(host, tokens, specs, namespace, host.activation_in(tokens))
        return self.outline_of(*text, most)

    def _fill_compressed(
        self, identity: str, tokens: Tensor, cache: ModelCache, whole: bool, probed: FindGeometry
    ) -> None:
        """Copy the longest compressed text that is a prefix of `tokens` into an empty cache. If
        `whole`, the text must have all tokens, otherwise at least half of them, because the rest is
        not compressed."""
        least = len(tokens) if whole else (len(tokens) + 1) // 2
        text = self._entries.text(identity, tokens, least)
        longest = least - 1 if text is None else len(text.tokens)
        if self._exchange is not None and longest < len(tokens):
            text = self._exchange.fetch_compressed(identity, tokens, longest, probed) or text
        self._count(0 if text is None else len(text.tokens), len(tokens))
        if text is not None and isinstance(text.content, Compressed):
            text.content.fill(cache, self._entries.geometry(identity, None))

    def _add_compressed(
        self, host: Host, tokens: Tensor, cache: ModelCache, namespace: str, priority: int
    ) -> None:
        """Store the slots of a cache that was just compressed."""
        identity = keyed(host, tokens, cache.specs, namespace).identity
        geometry = self._entries.agreed(identity, ModelGeometry.of_cache(cache))
        text = Node(tokens.clone(), Compressed.of(cache), whole=True)
        text.priority = priority
        self._entries.keep_text(identity, text)
        if self._exchange is not None:
            self._exchange.write_compressed(identity, tokens, text.content, geometry)
