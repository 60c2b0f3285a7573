"""Prompts and chats with blocks: tokenization, and building their caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from kvkeep.blocks import chat
from kvkeep.blocks.compressed import assemble_compressed, compressed_bytes
from kvkeep.blocks.join import moving, windowed
from kvkeep.blocks.parts import Part, listed, marked
from kvkeep.blocks.prefill import Assembled, Source, Span, assemble
from kvkeep.blocks.recomputation import why_not_compared
from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.blocks.tokenize import SHORTEST, BlockTokens, tokenized
from kvkeep.errors import ShapeError, SpecError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.host import Activation, Host, ModelCache, Specs, host_of
from kvkeep.host.compress import compresses
from kvkeep.store import PrefixStore
from kvkeep.store.beginning import begin, beginning_of, settle
from kvkeep.store.identity import feed, keyed, require_reusable

_SHOWN = 40  # characters of a block in a report


@dataclass(frozen=True)
class BlockReport:
    """A block of a prompt: its first characters; its tokens `start` to `stop`; and why it was not
    reused (empty: it was reused)."""

    text: str
    start: int | None
    stop: int | None
    refused: str


@dataclass(frozen=True)
class Report:
    """The sources of a prompt's keys and values, in tokens.

    Args:
        tokens: all tokens of the prompt except the last.
        exact: found as a stored prefix; their slots equal a plain prefill's, bit for bit.
        found: found in stored blocks.
        repaired: tokens of blocks that were recomputed, attending to all tokens before them.
        approximate: tokens of blocks that were not recomputed: they did not attend to the tokens
            before their block.
        compressed: tokens of texts compressed by policy `kvzip`.
        deviation: estimated distance of the approximate tokens from a plain prefill: the relative
            norm of the difference of keys and values in the second layer, over a sample. 0 if no
            token is approximate, None if there is no estimate. Its effect on an answer depends on
            the model.
        blocks: one report for each marked block.
    """

    tokens: int
    exact: int
    found: int
    repaired: int
    approximate: int
    compressed: int
    deviation: float | None
    blocks: list[BlockReport]

    @property
    def cached(self) -> int:
        """Tokens that came from the store."""
        return self.exact + self.found

    def asdict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


class Prefilled(NamedTuple):
    """A cache of a prompt's tokens except the last, and the sources of these tokens."""

    cache: ModelCache
    report: Report


class Encoded:
    """A prompt's tokens, and which of them belong to blocks.

    Attributes:
        input_ids: int64 (1, n).
        blocks: tokens of each marked block, in order; a nested block follows its container.
        report: report of the last prefill, also by `generate`; None before the first prefill.
    """

    def __init__(self, ids: Tensor, blocks: Sequence[BlockTokens]) -> None:
        self.input_ids = ids[None]
        self.blocks = list(blocks)
        self.report: Report | None = None

    def prefill(
        self,
        model: Any,
        *,
        store: PrefixStore | None = None,
        recompute: Recompute = RECOMPUTE,
        spec: Specs = "keep_all",
        namespace: str = "",
        capacity: int | None = None,
    ) -> Prefilled:
        """Build a cache of all tokens except the last, which `generate` or your own loop feeds.

        A stored prefix is used unchanged. After it, each block is taken from the store or computed
        by itself, and all other tokens are computed in place. Blocks that cannot be reused are
        treated as text, and the report says why.

        Args:
            model: an attached model.
            recompute: which tokens of blocks are recomputed; see `kvkeep.blocks.prefill`.
            spec: spec of the cache.
            store: the store for computed tokens.
            namespace: namespace of the store's entries.
            capacity: see `kvkeep.Cache`.

        Raises:
            ShapeError: the prompt is empty, or longer than the model's context.
            SpecError: `recompute` or the spec is invalid.
        """
        parsed(recompute)
        store = PrefixStore() if store is None else store
        source = Source(model, store, spec, namespace, capacity)
        host = host_of(model)
        cache = host.new_cache(spec, capacity=capacity)
        tokens = self._tokens(host.context)
        prompt = self.input_ids[0]
        cache.activation = host.activation_in(prompt)
        exact, known = beginning_of(cache, tokens)
        begins = exact != cache.specs
        text = host.new_cache(exact, capacity=capacity) if begins else cache
        text.activation = cache.activation
        try:
            require_reusable(host, text, outside=store.backend is not None)
        except UnsupportedError as error:
            feed(host, tokens, cache)
            refused = [block.refuse(str(error)) for block in self.blocks]
            return self._reported(Assembled(cache, 0, 0, 0, 0.0), [], refused)
        compressed = compresses(text)
        whole = _why_not_any(host, text, 0 if compressed and recompute != "all" else recompute)
        blocks = [
            block.refuse(whole or _why_not(block, host, text, store.budget))
            for block in self.blocks
        ]
        spans = sorted(one.span for one in blocks if one.span is not None and not one.refused)
        spans = [Span(start, min(stop, len(known))) for start, stop in spans]
        spans = [span for span in spans if span.start < span.stop]
        if compressed:
            read = assemble_compressed(source, tokens, spans)
            return self._reported(read, [span for span in spans if span.start], blocks)
        if begins and not spans:
            found = source.read(tokens, prompt)
            return self._reported(Assembled(*found, 0, 0, 0.0), spans, blocks)
        stored = store.known(*keyed(host, known, exact, namespace, cache.activation))
        behind = [span for span in spans if span.stop > stored]
        first = behind[0].start if behind else len(known)
        if behind and first == 0:  # a block at the start need not be moved
            first = behind.pop(0).stop
        source = replace(source, spec=exact, capacity=None if begins else capacity)
        read = assemble(source, known, behind, first=first, recompute=recompute, prompt=prompt)
        if begins:
            begin(cache, read.cache)
            feed(host, tokens[cache.fed :], cache)
            settle(cache)
            read = read._replace(cache=cache)
        return self._reported(read, behind, blocks)

    def _tokens(self, most: int | None) -> Tensor:
        """All tokens except the last, (n,)."""
        ids = self.input_ids[0]
        if not len(ids) or len(ids) > (most or len(ids)):
            raise ShapeError(
                f"a prompt of {len(ids)} tokens, but the model takes 1 to {most or 'any number'}; "
                "give it text, or a shorter prompt"
            )
        return ids[:-1]

    def _reported(
        self, read: Assembled, spans: Sequence[Span], blocks: Sequence[BlockTokens]
    ) -> Prefilled:
        approximate = sum(span.stop - span.start for span in spans) - read.repaired
        self.report = Report(
            tokens=read.cache.fed,
            exact=read.exact,
            found=read.found,
            repaired=read.repaired,
            approximate=approximate,
            compressed=read.compressed,
            deviation=read.deviation if approximate else 0.0,
            blocks=list(map(_report_of, blocks)),
        )
        return Prefilled(read.cache, self.report)


class Prompt:
    """A prompt made of parts.

    Args:
        parts: text, `Text`, `Block`, or anything with `parts()`.

    Raises:
        SpecError: a value is not a part.
    """

    def __init__(self, parts: Part | Sequence[Part]) -> None:
        self._parts = list(listed(parts))
        self._marked = marked(self._parts)

    def parts(self) -> Sequence[Part]:
        """Its parts."""
        return self._parts

    @property
    def text(self) -> str:
        """The whole text."""
        return self._marked.text

    def encode(self, tokenizer: Any, *, shortest: int = SHORTEST) -> Encoded:
        """Tokenize the prompt, with the special tokens that the tokenizer adds, such as BOS.

        Args:
            shortest: fewest tokens of a block to reuse.
        """
        ids, blocks = tokenized(
            tokenizer, self.text, self._marked.marks, special=True, shortest=shortest
        )
        return Encoded(ids, blocks)


class Chat:
    """Messages of a chat, which may contain blocks.

    Args:
        messages: as for `apply_chat_template`. Any text, tool results included, may be replaced by
            a part or a list of parts and text.
        options: options of `apply_chat_template`, such as `tools=`, which may contain parts too.
            `add_generation_prompt` is True by default.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> None:
        self.messages = list(messages)
        if "tokenize" in options:
            raise SpecError("Chat takes no tokenize=; encode() returns tokens; leave it out")
        going_on = bool(options.get("continue_final_message"))
        self.options = {"add_generation_prompt": not going_on} | options

    def encode(self, tokenizer: Any, *, shortest: int = SHORTEST) -> Encoded:
        """Render the chat by the tokenizer's chat template, and tokenize it.

        Args:
            shortest: fewest tokens of a block to reuse.

        Raises:
            SpecError: the tokenizer has no chat template, or a value is not a part.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise SpecError("this tokenizer has no chat template; give a Prompt, or set one")

        def render(given: Mapping[str, Any]) -> str:
            text: str = tokenizer.apply_chat_template(tokenize=False, **given)
            return text

        text, marks = chat.rendered({"conversation": self.messages} | self.options, render)
        ids, blocks = tokenized(tokenizer, text, marks, special=False, shortest=shortest)
        return Encoded(ids, blocks)


def _why_not_any(host: Host, cache: ModelCache, recompute: Recompute) -> str:
    """Why a model cannot reuse any block; empty if it can."""
    if recompute == "all":
        return 'recompute="all" computes everything'
    if reason := cache.why_not(Feature.JOINED):
        return f"the model {reason}"
    try:
        moving(host)
    except UnsupportedError as error:
        return str(error)
    if not host.attached:
        return "the model is not attached; call kvkeep.attach(model)"
    windows = windowed(cache)
    if windows:
        return f"{windows}, so blocks cannot be moved"
    if any(layer.slots.storage.limit is not None for layer in cache.layers):
        return "fixed storage has no room for recomputed tokens; use @growing"
    reason = why_not_compared(host) if parsed(recompute).mode == "share" else ""
    return f"{reason}; use recompute='boundary:32'" if reason else ""


def _why_not(block: BlockTokens, host: Host, cache: ModelCache, budget: int | None) -> str:
    """Why a block cannot be reused; empty if it can."""
    if block.span is None:
        return ""
    active: Activation | None = cache.activation
    if active is not None and block.span.stop > active.start:
        return f"an adapter is active from token {active.start} on, so the block cannot be moved"
    tokens = block.span.stop - block.span.start
    if reason := cache.why_not_moved(tokens, block.span.start):
        return f"the model {reason}"
    if budget is None:
        return ""
    nbytes = compressed_bytes(cache, host.geometries(), tokens)
    if nbytes > budget:
        return f"its {tokens} tokens take {nbytes} bytes, but the store holds {budget}"
    return ""


def _report_of(block: BlockTokens) -> BlockReport:
    start, stop = block.span or (None, None)
    return BlockReport(block.text[:_SHOWN], start, stop, block.refused)
