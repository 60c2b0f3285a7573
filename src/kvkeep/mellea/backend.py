"""KVKeepBackend: Mellea's local backend with a model attached to kvkeep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar, cast, final

import torch
import transformers
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.errors import SpecError, StateError, UnsupportedError
from kvkeep.extras import needed_by
from kvkeep.hf.attach import attach, detach
from kvkeep.hf.cache_argument import OF_GENERATE
from kvkeep.host import Specs, host_of
from kvkeep.mellea.caching import CACHING, Resolved, caching_in
from kvkeep.mellea.call import Call, calling, current_calls
from kvkeep.mellea.marks import Reader, encoded
from kvkeep.mellea.together import FairLock, Together
from kvkeep.store import PrefixStore

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.backends import ModelOption
    from mellea.backends.adapters import EmbeddedBinding
    from mellea.backends.huggingface import LocalHFBackend
    from mellea.backends.model_ids import ModelIdentifier
    from mellea.backends.tools import (
        add_tools_from_context_actions,
        add_tools_from_model_options,
        convert_tools_to_json,
    )
    from mellea.backends.utils import to_chat
    from mellea.core import Context, ModelOutputThunk, Span
    from mellea.core.base import AbstractMelleaTool
    from mellea.formatters.granite import IntrinsicsRewriter
    from mellea.formatters.granite.base.util import chat_completion_request_to_transformers_inputs
    from mellea.helpers import message_to_openai_message, messages_to_docs
    from mellea.stdlib.components import Intrinsic

_T = TypeVar("_T")


@final
class KVKeepBackend(LocalHFBackend):
    """Mellea's local backend with a model attached to kvkeep.

    The keys and values of a prompt's prefix are reused if an earlier prompt or answer started with
    it. Texts marked by `CBlock(text, cache=True)`, and components marked by `kvkeep.mellea.cached`,
    are blocks: their keys and values are reused in any place and order where a prompt contains them
    verbatim; see `kvkeep.blocks`. If an invocation activates an adapter (aLoRA), the base model
    computes the tokens before it. A call's model option `kvkeep.mellea.CACHING`, a `Caching`,
    changes how that call caches. In all other respects this is a `LocalHFBackend`. As a context
    manager it closes on exit.

    Args:
        model: the model, on its device; it stays attached until `close`.
        tokenizer: a tokenizer with a chat template.
        store: the store for prompts and blocks, which may be shared; None: a new one.
        recompute: which tokens of blocks are recomputed; see `kvkeep.blocks.prefill`.
        namespace: namespace of the store's entries.
        spec: spec of the caches.
        sequences: most calls answered at once, by a `kvkeep.Batch`; 1: one after the other, by
            transformers' `generate`.
        model_id: the name by which Mellea chooses templates and adapters; None: the model's own.
        options: keyword arguments of `LocalHFBackend`, such as `model_options=`.

    Raises:
        StateError: the model is already attached.
        SpecError: `recompute`, `sequences` or the spec is invalid.
        UnsupportedError: transformers is 5.24 or newer, or `kvkeep.attach` does not support the
            model.
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
        sequences: int = 1,
        model_id: str | ModelIdentifier | None = None,
        **options: Any,
    ) -> None:
        if OF_GENERATE == "cache":
            raise UnsupportedError(
                f"Mellea 0.8 does not support transformers {transformers.__version__}, which "
                "renames the cache in its outputs; install 'transformers<5.24'"
            )
        parsed(recompute)
        if sequences < 1:
            raise SpecError(f"sequences is {sequences}; give at least 1")
        self.store = PrefixStore() if store is None else store
        self._caching = Resolved(spec, self.store, namespace, recompute)
        name = model_id or model.name_or_path or type(model).__name__
        super().__init__(name, custom_config=(tokenizer, model, model.device), **options)
        caching_in(self.model_options)
        attach(model, spec, store=self.store, namespace=namespace, recompute=recompute)
        self._together: Together | None = None
        if sequences > 1:
            lock = FairLock()
            self._generation_lock = lock  # type: ignore[assignment]
            self._together = Together(
                model,
                tokenizer,
                sequences=sequences,
                lock=lock,
                before=lambda: self.deactivate_peft_adapter(""),
            )

    def __enter__(self) -> KVKeepBackend:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running generations, then detach the model; the store is unchanged."""
        if self._together is not None:
            self._together.close()
        with self._generation_lock:
            if not self._closed:
                detach(self._model)
                self._closed = True

    async def aclose(self) -> None:
        """See `close`."""
        self.close()

    # -- calls ------------------------------------------------------------------------------

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

        def render(reader: Reader) -> str:
            system = model_options.get(ModelOption.SYSTEM_PROMPT)
            chat = to_chat(action, ctx, reader.formatter, system)
            tools = self._described(model_options, ctx, [action]) if with_tools else []
            template = self._filter_for_chat_template(model_options)
            return self._templated(
                conversation=chat, tools=tools, add_generation_prompt=True, **template
            )

        spans = [*(ctx.view_for_generation() or []), action] if ctx.is_chat_context else []
        call = self._call(model_options, spans, render)
        with calling(self._model, [call]):
            answer = await super()._generate_from_context_standard(
                action, ctx, model_options=model_options, tool_calls=tool_calls, **options
            )
        call.follow(answer)
        return answer

    async def _generate_from_intrinsic(
        self,
        action: Intrinsic,
        ctx: Context,
        *,
        model_options: dict[str, Any],
        tool_calls: bool = False,
    ) -> ModelOutputThunk[Any]:
        view = (ctx.view_for_generation() or []) if ctx.is_chat_context else []
        allowed = tuple(kind.value for kind in action.adapter_types)
        adapter: Any = self._find_adapter(action.intrinsic_name, allowed)

        def render(reader: Reader) -> str:
            messages = [reader.message(m) for m in reader.formatter.to_chat_messages(view)]
            system = model_options.get(ModelOption.SYSTEM_PROMPT, "")
            conversation = [{"role": "system", "content": system}] if system else []
            conversation += [
                message_to_openai_message(message, provider=self._provider) for message in messages
            ]
            tools = self._described(model_options, ctx, []) if tool_calls else []
            request = {
                "messages": conversation,
                "extra_body": {"documents": messages_to_docs(messages)},
                "tools": [tool["function"] for tool in tools] or None,
            }
            name, config = self._intrinsic_adapter_name_and_config(adapter)
            rewriter = IntrinsicsRewriter(config_dict=deepcopy(config), model_name=name)
            rewritten = rewriter.transform(request, **action.intrinsic_kwargs).model_dump()
            (rewritten.get("extra_body") or {}).pop("structured_outputs", None)
            template = _Template(self._tokenizer, self._templated)
            chat_completion_request_to_transformers_inputs(
                rewritten, cast(Any, template), self._model
            )
            return template.text

        # If the adapter is part of the model, the chat template decides.
        apart = adapter is not None and not isinstance(adapter.weights, EmbeddedBinding)
        call = self._call(model_options, view if apart else [], render)
        with calling(self._model, [call]):
            answer = await super()._generate_from_intrinsic(
                action, ctx, model_options=model_options, tool_calls=tool_calls
            )
        call.follow(answer)
        return answer

    async def _generate_from_raw(
        self,
        actions: Sequence[Any],
        ctx: Context,
        *,
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[list[ModelOutputThunk[Any]], dict[str, Any] | None]:
        await self.do_generate_walks(list(actions))
        merged = self._simplify_and_merge(model_options)

        def call(action: Any) -> Call:
            def render(reader: Reader) -> str:
                return reader.formatter.print(action)

            return self._call(merged, [action], render, special=True)

        calls = list(map(call, actions))
        if not calls:
            return await super()._generate_from_raw(
                actions, ctx, model_options=model_options, **options
            )
        with calling(self._model, calls):
            answers, usage = await super()._generate_from_raw(
                actions, ctx, model_options=model_options, **options
            )
        for one, answer in zip(calls, answers, strict=True):
            one.tell(answer, answer.generate_log)
        return answers, usage

    def _call(
        self,
        options: dict[str, Any],
        spans: Sequence[Span],
        render: Callable[[Reader], str],
        *,
        special: bool = False,
    ) -> Call:
        """A prompt's caching options and its blocks.

        Args:
            options: the call's model options, merged with the backend's.
            spans: the parts of the prompt.
            render: renders the prompt as Mellea will.
            special: whether the tokenizer adds its special tokens.

        Raises:
            SpecError: the call's `Caching` is invalid.
            StateError: the call has a `Caching`, but the backend is closed.
        """
        given = caching_in(options)
        if self._closed and CACHING in options:
            raise StateError(
                f"this backend is closed, so the model option {CACHING!r} has no effect; leave it "
                "out, or make a new KVKeepBackend"
            )
        caching = given.over(self._caching)
        if given.spec is not None:
            host_of(self._model).new_cache(given.spec)  # raises if the spec does not fit
        blocks = None
        if caching.reuse and not self._closed:
            blocks = encoded(self._tokenizer, self.formatter, spans, render, special=special)
        return Call(caching, blocks, options.get(ModelOption.SEED))

    def _described(
        self, options: dict[str, Any], ctx: Context, actions: Sequence[Any]
    ) -> list[Any]:
        """The tools described to the model."""
        tools: dict[str, AbstractMelleaTool[..., Any]] = {}
        add_tools_from_model_options(tools, options)
        add_tools_from_context_actions(tools, ctx.actions_for_available_tools())
        add_tools_from_context_actions(tools, list(actions))
        return convert_tools_to_json(tools)

    def _templated(self, **given: Any) -> str:
        return str(self._tokenizer.apply_chat_template(tokenize=False, **given))

    # -- generation, in a thread of its own -------------------------------------------------

    def _generate_with_adapter_lock(
        self, generate_func: Callable[..., _T], *args: Any, **kwargs: Any
    ) -> _T:
        with _errors_streamed(kwargs.get("streamer")):
            if self._together is not None:
                found = self._together.generate(current_calls(), kwargs)
                if found is not None:
                    return cast(_T, found)
            return cast(_T, super()._generate_with_adapter_lock(generate_func, *args, **kwargs))


@contextmanager
def _errors_streamed(streamer: Any) -> Iterator[None]:
    """Forward an error to the consumers of a stream and end the stream. Otherwise they would wait
    until their timeout."""
    try:
        yield
    except Exception as error:
        if streamer is not None:
            streamer.loop.call_soon_threadsafe(streamer.text_queue.put_nowait, error)
            streamer.on_finalized_text("", stream_end=True)
        raise


@final
class _Template:
    """Replaces a tokenizer where Mellea applies its chat template, and keeps the rendered text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, render: Callable[..., str]) -> None:
        self._tokenizer, self._render = tokenizer, render
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *, return_tensors: str, **given: Any) -> BatchEncoding:
        self.text = self._render(**given)
        return BatchEncoding({"input_ids": torch.zeros(1, 1, dtype=torch.int64)})
