"""The systems that serve many sequences with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.generate import Answer, Batch, SamplingParams
from kvkeep.hf.attach import attach
from kvkeep.host import ModelCache, host_of
from kvkeep.spec import parse_specs
from kvkeep.store import PrefixStore
from kvkeep.store.identity import feed
from kvkeep_lab.bench import continuous, http_client
from kvkeep_lab.bench.device import device_named
from kvkeep_lab.bench.options import SPEC, Serve
from kvkeep_lab.bench.random_model import model_named
from kvkeep_lab.bench.systems import LLAMA_CPP, named, twin
from kvkeep_lab.bench.workload import Request, Served, Session, lengths, prompts, serve
from kvkeep_lab.checks import require_known

ALONE, COMPILED = "kvkeep alone", "kvkeep compiled"
PADDED, CONTINUOUS = "transformers padded", "transformers generate_batch"
UNIFIED = f"{LLAMA_CPP} unified"  # with one buffer for all sequences
AGAINST = (ALONE, COMPILED, PADDED, CONTINUOUS)
"""The systems to measure by default."""
OTHERS = (*AGAINST, LLAMA_CPP, UNIFIED)
SERVER = "kvkeep serve"

Prefix = tuple[Tensor, ModelCache]
"""Token ids (n,), and a cache that holds them."""

_ROOM = 1.02  # of a store, for the bytes of its prefix

Run = Callable[[Sequence[Request], int], Served]
"""Serves requests, each with a number of new tokens."""


class BatchSession:
    """Many sequences in one `kvkeep.Batch`.

    Args:
        model: an attached model.
        prefix: first tokens of all prompts, (n,), and a cache that holds them. They lie in a store
            of the batch before the first prompt comes. The store has room for little else, so
            later tokens are not held twice. None: there is no store.
    """

    def __init__(self, model: Any, spec: str, prefix: Prefix | None = None) -> None:
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


def read(model: Any, ids: Tensor, spec: str = SPEC, chunk: int | None = None) -> Prefix:
    """Token ids (n,), and a cache that holds them, as `BatchSession` takes them."""
    host = host_of(model)
    cache = host.new_cache(spec)
    feed(host, ids, cache, chunk)
    return ids, cache


@contextmanager
def contenders_of(asked: Serve) -> Iterator[tuple[Contenders, dict[int, list[Tensor]]]]:
    """The systems, and the prompts (n,) for each number of sequences."""
    against, shared = asked.against or (), asked.shared_prefix
    require_known("system", against, (*OTHERS, SERVER))
    for spec in asked.specs:
        parse_specs(spec)
    model, tokenizer = model_named(asked.model, asked.dtype, device_named(asked.device))
    sizes = {count: lengths(count, asked.shortest, asked.longest) for count in asked.sequences}
    vocabulary = model.config.vocab_size
    texts = {n: prompts(tokenizer, vocabulary, some, shared) for n, some in sizes.items()}
    prefix = next(iter(texts.values()))[0][:shared] if shared else None
    with TemporaryDirectory() as directory:
        yield Contenders(model, tokenizer, asked, Path(directory), prefix), texts


class Contenders:
    """Systems by name: "kvkeep" with each spec, and other systems.

    Args:
        model: in the library of transformers; it loses its end token.
        tokenizer: for `SERVER` only.
        asked: its specs are systems of kvkeep; `ALONE`, `COMPILED` and `SERVER` have the first.
        directory: directory for files of the model.
        prefix: first tokens of all prompts, (n,). Systems that can share it hold it before the
            first prompt comes.

    Raises:
        MissingPackageError, UnsupportedError: llama.cpp is not installed or cannot run this model;
            or `SERVER` has no tokenizer, or there is a prefix.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        asked: Serve,
        directory: Path,
        prefix: Tensor | None = None,
    ) -> None:
        against, specs = asked.against or (), asked.specs
        if {LLAMA_CPP, UNIFIED} & set(against):
            import_module("kvkeep_lab.bench.llama_cpp").require(model)
        if SERVER in against and (tokenizer is None or prefix is not None):
            raise UnsupportedError(
                f"{SERVER} is measured with a model that has a tokenizer, and without a shared "
                "prefix; leave out one of them"
            )
        model.generation_config.eos_token_id = None
        self._plain, self._tokenizer, self._routed = model, tokenizer, twin(model)
        attach(self._routed)
        self._compiled = twin(model) if COMPILED in against else None
        if self._compiled is not None:
            attach(self._compiled, compile=True)
        self._specs = {named(spec): spec for spec in specs}
        self._directory, self._prefix = directory, prefix
        self._read = {
            spec: None if prefix is None else read(self._routed, prefix, spec, 256)
            for spec in specs
        }
        self.names = (*self._specs, *against)

    def sessions(
        self, name: str, sequences: int, room: int, during: ExitStack
    ) -> Callable[[], Session]:
        """A function that returns an empty session of a system that can be stepped, or of `ALONE`;
        use one at a time.

        Args:
            sequences: how many there may be at a time.
            room: most tokens of each, new tokens included.
            during: frees the sessions' resources.
        """
        if name in (LLAMA_CPP, UNIFIED):
            made = import_module("kvkeep_lab.bench.llama_batch").LlamaSession
            shared = {"prefix": self._prefix, "unified": name == UNIFIED}
            session = made(self._plain, sequences, room, self._directory, **shared)
            during.callback(session.close)
            return session.cleared  # type: ignore[no-any-return]
        spec = self._specs.get(name, next(iter(self._specs.values())))
        model = self._compiled if name == COMPILED else self._routed
        host_of(model).warm(spec, sequences)
        return partial(BatchSession, model, spec, self._read[spec])

    def runs(self, name: str, sequences: int, room: int, during: ExitStack) -> Run:
        """How to run a system; for the arguments see `sessions`."""
        if name == PADDED:
            return partial(continuous.padded, self._plain)
        if name == CONTINUOUS:
            return partial(continuous.continuous, self._plain, prefix=self._prefix)
        if name == SERVER:
            spec = next(iter(self._specs.values()))
            given = (self._plain, self._tokenizer, spec, self._directory, sequences)
            return partial(http_client.stream, during.enter_context(http_client.server(*given)))
        new = self.sessions(name, sequences, room, during)
        return lambda requests, tokens: serve(new(), requests, tokens, alone=name == ALONE)
