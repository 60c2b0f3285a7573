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
from kvkeep.hf.attach import attach
from kvkeep.host import host_of
from kvkeep.spec import parse_specs
from kvkeep_lab.bench import continuous, http_client
from kvkeep_lab.bench.device import device_named
from kvkeep_lab.bench.options import Serve
from kvkeep_lab.bench.random_model import model_named
from kvkeep_lab.bench.sessions import BatchSession, OneByOne, read
from kvkeep_lab.bench.systems import LLAMA_CPP, named, twin
from kvkeep_lab.bench.workload import Request, Served, Session, lengths, prompts, serve
from kvkeep_lab.checks import require_known

ALONE, COMPILED = "kvkeep alone", "kvkeep compiled"
PADDED, CONTINUOUS = "transformers padded", "transformers generate_batch"
UNIFIED = f"{LLAMA_CPP} unified"  # with one buffer for all sequences
OTHERS = (ALONE, COMPILED, PADDED, CONTINUOUS, LLAMA_CPP, UNIFIED)
SERVER = "kvkeep serve"

Run = Callable[[Sequence[Request], int], Served]
"""Serves requests, each with a number of new tokens."""


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
        yield Contenders(model, tokenizer, asked.specs, against, Path(directory), prefix), texts


class Contenders:
    """Systems by name: "kvkeep" with each spec, and others.

    Args:
        model: in the library of transformers; it loses its end token.
        tokenizer: for `SERVER` only.
        specs: of kvkeep; `ALONE`, `COMPILED` and `SERVER` have the first.
        against: some of `OTHERS` and `SERVER`.
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
        specs: Sequence[str],
        against: Sequence[str],
        directory: Path,
        prefix: Tensor | None = None,
    ) -> None:
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
            spec: None if prefix is None else read(self._routed, prefix, spec) for spec in specs
        }
        self.names = (*self._specs, *against)
        self.kvkeep = tuple(self._specs)

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
            session = import_module("kvkeep_lab.bench.llama_batch").LlamaSession(
                self._plain,
                sequences,
                room,
                self._directory,
                prefix=self._prefix,
                unified=name == UNIFIED,
            )
            during.callback(session.close)

            def cleared() -> Session:
                session.clear()
                return session  # type: ignore[no-any-return]

            return cleared
        spec = self._specs.get(name, next(iter(self._specs.values())))
        model = self._compiled if name == COMPILED else self._routed
        host_of(model).warm(spec, sequences)

        def batch() -> Session:
            session = BatchSession(model, spec, self._read[spec])
            return OneByOne(session) if name == ALONE else session

        return batch

    def runs(self, name: str, sequences: int, room: int, during: ExitStack) -> Run:
        """How to run a system; for the arguments see `sessions`."""
        if name == PADDED:
            return partial(continuous.padded, self._plain)
        if name == CONTINUOUS:
            return partial(continuous.continuous, self._plain, prefix=self._prefix)
        if name == SERVER:
            spec = next(iter(self._specs.values()))
            server = http_client.server(
                self._plain, self._tokenizer, spec, self._directory, sequences
            )
            return partial(http_client.stream, during.enter_context(server))
        new = self.sessions(name, sequences, room, during)
        return lambda requests, tokens: serve(new(), requests, tokens)
