"""KVKeepBackend: a backend for Mellea whose prompts share cached prefixes and blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from typing import Any, cast, final

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.blocks import Block, BlockReport, Encoded, Report
from kvkeep.blocks.chat import Marks, located
from kvkeep.blocks.parts import Mark, Refused, marked
from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.blocks.tokenize import SHORTEST, tokenized
from kvkeep.extras import needed_by
from kvkeep.hf.attach import attach, detach
from kvkeep.host import ModelCache, Specs
from kvkeep.host.compress import compressed_tokens
from kvkeep.store import PrefixStore

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.backends import ModelOption
    from mellea.backends.huggingface import LocalHFBackend
    from mellea.backends.model_ids import ModelIdentifier
    from mellea.backends.tools import (
        add_tools_from_context_actions,
        add_tools_from_model_options,
        convert_tools_to_json,
    )
    from mellea.backends.utils import to_chat
    from mellea.core import CBlock, Component, Context, ModelOutputThunk, Span
    from mellea.core.base import AbstractMelleaTool

_KEY = "kvkeep"  # key of the report in an answer's log
_SHOWN = 40  # characters of a block shown in a report
_LOST = "no message of the prompt contains it"
_READING = Lock()
_OTHER = "Mellea's prompt differs from the one in which the blocks were found"


@final
class KVKeepBackend(LocalHFBackend):
    """Mellea's local backend, with a model that is attached to kvkeep.

    The keys and values of a prompt's prefix are reused if an earlier prompt or answer started with
    it. Texts marked by `CBlock(text, cache=True)` are blocks, whose keys and values are reused in
    any place and order where the prompt contains them verbatim: see `kvkeep.blocks`. In all other
    respects it is a `LocalHFBackend`. As a context manager it closes on exit.

    Args:
        model: the model, on its device; it stays attached until `close`.
        tokenizer: a tokenizer with a chat template.
        store: the store for prompts and blocks, which may be shared; None: a new one.
        recompute: which tokens of blocks are recomputed: see `kvkeep.blocks.prefill`.
        namespace: namespace of the store's entries.
        spec: spec of the caches.
        model_id: the name by which Mellea chooses templates and adapters; None: the model's own.
        options: keyword arguments of `LocalHFBackend`, such as `model_options=`.

    Raises:
        StateError: the model is attached already.
        SpecError: `recompute` or the spec is invalid.
        UnsupportedError: see `kvkeep.attach`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        store: PrefixStore | None = None,
        recompute: Recompute = RECOMPUTE,
        namespace: str = "",
        spec: Specs = "keep_all",
        model_id: str | ModelIdentifier | None = None,
        **options: Any,
    ) -> None:
        parsed(recompute)
        self.store = PrefixStore() if store is None else store
        name = model_id or model.name_or_path or type(model).__name__
        super().__init__(name, custom_config=(tokenizer, model, model.device), **options)
        calls = _CallStore(self.store, recompute)
        attach(model, spec, store=calls, namespace=namespace, recompute=recompute)

    def __enter__(self) -> KVKeepBackend:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for a running generation, then detach the model; the store is unchanged."""
        with self._generation_lock:
            if not self._closed:
                detach(self._model)
                self._closed = True

    async def aclose(self) -> None:
        """See `close`."""
        self.close()

    async def _generate_from_context_standard(
        self,
        action: Span,
        ctx: Context,
        *,
        model_options: dict[str, Any],
        tool_calls: bool = False,
        **options: Any,
    ) -> ModelOutputThunk[Any]:
        with_tools = tool_calls and options.get("_format") is None
        call = self._call(action, ctx, model_options, with_tools)
        token = _CALL.set(call)  # inherited by tasks and threads that are started from here on
        try:
            thunk = await super()._generate_from_context_standard(
                action, ctx, model_options=model_options, tool_calls=tool_calls, **options
            )
        finally:
            _CALL.reset(token)
        assert thunk._gen.post_process is not None
        thunk._gen.post_process = partial(_with_report, thunk._gen.post_process, call)
        return thunk

    def _call(self, action: Span, ctx: Context, options: dict[str, Any], with_tools: bool) -> _Call:
        """Render the prompt as Mellea will render it, and find its blocks."""
        spans = [*(ctx.view_for_generation() or []), action]
        wanted = dict.fromkeys(text for span in spans for text in _marked_in(span))
        if not wanted:
            return _Call()
        system = options.get(ModelOption.SYSTEM_PROMPT)
        tools: dict[str, AbstractMelleaTool[..., Any]] = {}
        if with_tools:
            add_tools_from_model_options(tools, options)
            add_tools_from_context_actions(tools, ctx.actions_for_available_tools())
            add_tools_from_context_actions(tools, [action])
        template = self._filter_for_chat_template(options)
        described: list[Any] = convert_tools_to_json(tools)

        reads: list[Marks] = []

        def render(marks: Marks) -> str:
            reads.append(marks)
            with _reading(marks):
                chat = to_chat(action, ctx, self.formatter, system)
            asked = {"add_generation_prompt": True, "tokenize": False, **template}
            return str(self._tokenizer.apply_chat_template(chat, tools=described, **asked))

        text, found = located(render)
        # A component may read a text more often than it renders it; some reads are not in the text.
        read = list(zip(reads[0].texts, found, strict=True))
        placed = {text for text, place in read if isinstance(place, Mark)}
        lost = {text: Refused(text, _LOST) for text in wanted if text not in placed}
        lost |= {
            text: place for text, place in read if isinstance(place, Refused) and text not in placed
        }
        places = sorted(
            (place for _, place in read if isinstance(place, Mark)),
            key=lambda place: (place.start, -place.stop),
        )
        ids, segments = tokenized(
            self._tokenizer, text, [*places, *lost.values()], special=False, shortest=SHORTEST
        )
        return _Call(Encoded(ids, segments))


def report_of(answer: ModelOutputThunk[Any]) -> Report | None:
    """The sources of the keys and values of an answer's prompt. None before the answer is complete,
    or if no store was used."""
    log = answer.generate_log
    report: Report | None = None if log is None else (log.extra or {}).get(_KEY)
    return report


@dataclass
class _Call:
    """A prompt that is about to be generated from.

    Args:
        encoded: the prompt's tokens and blocks, if it has marked texts.
        report: the sources of its keys and values, set after the prefill.
    """

    encoded: Encoded | None = None
    report: Report | None = None


_CALL: ContextVar[_Call | None] = ContextVar("kvkeep_mellea_call", default=None)


@final
class _CallStore:
    """The store that `generate` uses: it handles the blocks of the current call's prompt."""

    def __init__(self, store: PrefixStore, recompute: Recompute) -> None:
        self._store = store
        self._recompute = recompute

    def prefill(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        *,
        spec: Specs,
        namespace: str,
        chunk: int | None,
        capacity: int | None,
    ) -> ModelCache:
        """A cache that holds all tokens (n,) but the last. Blocks are used if `tokens` equals the
        prompt in which they were found."""
        call = _CALL.get() or _Call()
        encoded, store = call.encoded, self._store
        if encoded is not None and encoded.input_ids[0].equal(tokens.cpu()):
            cache, report = encoded.prefill(
                model,
                store=store,
                recompute=self._recompute,
                spec=spec,
                namespace=namespace,
                capacity=capacity,
            )
        else:
            cache, found = store.read(
                model,
                tokens[:-1],
                prompt=tokens,
                spec=spec,
                namespace=namespace,
                chunk=chunk,
                capacity=capacity,
            )
            unused = [
                BlockReport(segment.text[:_SHOWN], None, None, _OTHER)
                for segment in ([] if encoded is None else encoded.blocks)
            ]
            compressed = compressed_tokens(cache)
            exact = 0 if compressed else found
            report = Report(cache.fed, exact, found - exact, 0, 0, compressed, 0.0, unused)
        call.report = report
        return cache

    def learn(
        self, model: PreTrainedModel, tokens: Tensor, cache: ModelCache, *, namespace: str
    ) -> int:
        """Store the tokens (n,) that a cache was fed; returns how many of them are stored."""
        return self._store.learn(model, tokens, cache, namespace=namespace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # for prompts with blocks passed to `generate` directly


async def _with_report(
    finish: Callable[[ModelOutputThunk[Any]], Awaitable[None]],
    call: _Call,
    answer: ModelOutputThunk[Any],
) -> None:
    """Finish an answer as Mellea does, and add the report of its prompt to the answer's log."""
    await finish(answer)
    log, usage = answer.generate_log, answer.generation.usage
    if call.report is not None and log is not None:
        log.extra = {**(log.extra or {}), _KEY: call.report}
        if usage is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": call.report.cached}


def _marked_in(span: Span) -> Iterator[str]:
    """The marked texts in a span, without surrounding white space."""
    if isinstance(span, CBlock):
        if span.cache and span.value and span.value.strip():
            yield span.value.strip()
    elif isinstance(span, Component):
        for part in span.parts():
            yield from _marked_in(part)


@contextmanager
def _reading(marks: Marks) -> Iterator[None]:
    """Within this context, `value` of a marked CBlock returns its text with marks around it.

    Components render blocks in different ways, but all read their `value`, so that is where a text
    can be identified as a block's. Other threads read the plain texts.
    """
    thread, plain = get_ident(), cast(property, vars(CBlock)["value"])
    read = plain.fget
    assert read is not None

    def value(block: CBlock) -> str | None:
        text: str | None = read(block)
        if get_ident() == thread and block.cache and text and text.strip():
            return marks.put(marked(Block(text)))
        return text

    with _READING:
        CBlock.value = property(value, plain.fset)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            CBlock.value = plain  # type: ignore[assignment, method-assign]
