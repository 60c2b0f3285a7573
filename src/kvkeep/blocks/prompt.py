"""Prompts and chats with blocks, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kvkeep.blocks import chat
from kvkeep.blocks.join import moving, windowed
from kvkeep.blocks.parts import Part, listed, marked
from kvkeep.blocks.prefill import Assembled, Span, assemble
from kvkeep.blocks.recomputation import compares
from kvkeep.blocks.recompute_option import RECOMPUTE, Recompute, parsed
from kvkeep.blocks.tokenize import SHORTEST, BlockTokens, tokenized
from kvkeep.errors import ShapeError, SpecError, UnsupportedError
from kvkeep.host import Activation, Host, ModelCache, Specs, host_of
from kvkeep.store import PrefixStore
from kvkeep.store.identity import feed, keyed, require_steady
from kvkeep.store.layer_slices import require_keepable

_SHOWN = 40  # characters of a block in a report


@dataclass(frozen=True)
class BlockReport:
    """What became of a block: its first characters, the tokens it is of the prompt, and why it was
    not reused; empty if it was."""

    text: str
    start: int | None
    stop: int | None
    refused: str


@dataclass(frozen=True)
class Report:
    """Where a prompt's keys and values came from, in tokens.

    Args:
        tokens: of the prompt, its last one aside.
        exact: found as the beginning of texts before: what reading gives, to the last bit.
        found: of blocks, found.
        repaired: of blocks, computed again, knowing what stands before them.
        approximate: of blocks, used as they were computed, without what stands before them.
        deviation: an estimate of how far the approximate ones are from what reading everything
            gives: the relative norm of the difference of keys and values in the second layer, of a
            sample. 0 where nothing is approximate, None where nothing tells. How much of it a
            model's answer shows is the model's matter.
        blocks: what became of each marked block.
    """

    tokens: int
    exact: int
    found: int
    repaired: int
    approximate: int
    deviation: float | None
    blocks: list[BlockReport]

    @property
    def cached(self) -> int:
        """Tokens that the store had."""
        return self.exact + self.found

    def asdict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


class Prefilled(NamedTuple):
    """A cache of all tokens of a prompt but the last, and where they came from."""

    cache: ModelCache
    report: Report


class Encoded:
    """A prompt's tokens, and which of them are blocks.

    Attributes:
        input_ids: int64 (1, n).
        blocks: what became of each marked block, in order, those inside others behind them.
        report: of the last prefill, by `generate` too; None before.
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
        """A cache of all tokens but the last, which `generate` or your loop feeds.

        What the store has as the beginning of other texts is used as it is. Behind that, each
        block is found or computed by itself, and the rest computed where it stands. Where blocks
        cannot be reused they are read like any other text, and the report says why.

        Args:
            model: attached.
            recompute: which tokens of blocks are computed again: see `kvkeep.blocks.prefill`.
            spec: of the cache.
            store: where they are found, and kept.
            namespace: of its entries.
            capacity: see `kvkeep.Cache`.

        Raises:
            ShapeError: no tokens, or more than the model's context has room for.
            SpecError: a `recompute` or spec that does not exist.
        """
        parsed(recompute)
        store = PrefixStore() if store is None else store
        host = host_of(model)
        cache = host.new_cache(spec, capacity=capacity)
        tokens = self._tokens(host.context)
        prompt = self.input_ids[0]
        cache.activation = host.activation_in(prompt)
        try:
            require_keepable(cache)
            require_steady(host)
        except UnsupportedError as error:
            feed(host, tokens, cache)
            refused = [segment.refuse(str(error)) for segment in self.blocks]
            return self._reported(Assembled(cache, 0, 0, 0, 0.0), [], refused)
        whole = _why_not_any(host, cache, recompute)
        segments = [
            segment.refuse(whole or _why_not(segment, host, cache, store.budget))
            for segment in self.blocks
        ]
        known = store.known(*keyed(host, tokens, cache.specs, namespace, cache.activation))
        spans = [
            Span(one.span.start, min(one.span.stop, len(tokens)))
            for one in segments
            if one.span is not None and not one.refused
        ]
        behind = sorted(span for span in spans if span.stop > known)
        first = behind[0].start if behind else len(tokens)
        if behind and first == 0:  # it stands where it was computed
            first = behind.pop(0).stop
        read = assemble(
            model,
            tokens,
            behind,
            first=first,
            prompt=prompt,
            capacity=capacity,
            recompute=recompute,
            spec=spec,
            store=store,
            namespace=namespace,
        )
        return self._reported(read, behind, segments)

    def _tokens(self, most: int | None) -> Tensor:
        """All tokens but the last, (n,)."""
        ids = self.input_ids[0]
        if not len(ids) or len(ids) > (most or len(ids)):
            raise ShapeError(
                f"a prompt of {len(ids)} tokens, but the model takes 1 to {most or 'any number'}; "
                "give it text, or less of it"
            )
        return ids[:-1]

    def _reported(
        self, read: Assembled, spans: Sequence[Span], segments: Sequence[BlockTokens]
    ) -> Prefilled:
        approximate = sum(span.stop - span.start for span in spans) - read.repaired
        self.report = Report(
            tokens=read.cache.fed,
            exact=read.exact,
            found=read.found,
            repaired=read.repaired,
            approximate=approximate,
            deviation=read.deviation if approximate else 0.0,
            blocks=list(map(_report_of, segments)),
        )
        return Prefilled(read.cache, self.report)


class Prompt:
    """Parts, one behind the other.

    Args:
        parts: text, `Text`, `Block`, or anything with `parts()`.

    Raises:
        SpecError: one of them is no part.
    """

    def __init__(self, parts: Part | Sequence[Part]) -> None:
        self._parts = list(listed(parts))
        self._marked = marked(self._parts)

    def parts(self) -> Sequence[Part]:
        """What it is made of."""
        return self._parts

    @property
    def text(self) -> str:
        """All of it."""
        return self._marked.text

    def encode(self, tokenizer: Any, *, shortest: int = SHORTEST) -> Encoded:
        """Its tokens, with those that the tokenizer adds, such as BOS.

        Args:
            shortest: blocks of fewer tokens are not reused.
        """
        ids, segments = tokenized(
            tokenizer, self.text, self._marked.marks, special=True, shortest=shortest
        )
        return Encoded(ids, segments)


class Chat:
    """Messages of a chat, which may contain blocks.

    Args:
        messages: as for `apply_chat_template`; where it takes text, a part or a list of parts and
            text may stand, in tool results too.
        options: of `apply_chat_template`, such as `tools=`, which may contain parts too. An answer
            is asked for (`add_generation_prompt=True`) if they do not say otherwise.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> None:
        self.messages = list(messages)
        if "tokenize" in options:
            raise SpecError(
                "tokenize= is not for Chat, which encode() turns into tokens; leave it out"
            )
        going_on = bool(options.get("continue_final_message"))
        self.options = {"add_generation_prompt": not going_on} | options

    def encode(self, tokenizer: Any, *, shortest: int = SHORTEST) -> Encoded:
        """Its tokens, as the tokenizer's chat template has it.

        Args:
            shortest: blocks of fewer tokens are not reused.

        Raises:
            SpecError: the tokenizer has no chat template, or something is no part.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise SpecError("this tokenizer has no chat template; give a Prompt, or set one")

        def render(given: Mapping[str, Any]) -> str:
            text: str = tokenizer.apply_chat_template(tokenize=False, **given)
            return text

        text, marks = chat.rendered({"conversation": self.messages} | self.options, render)
        ids, segments = tokenized(tokenizer, text, marks, special=False, shortest=shortest)
        return Encoded(ids, segments)


def _why_not_any(host: Host, cache: ModelCache, recompute: Recompute) -> str:
    """Why no block can be reused by a model; empty if they can."""
    if recompute == "all":
        return 'recompute="all" reads everything'
    try:
        moving(host)
    except UnsupportedError as error:
        return str(error)
    if not host.attached:
        return "the model is not attached; kvkeep.attach(model)"
    windows = windowed(cache)
    if windows:
        return f"{windows}, and what stands there moves"
    if any(layer.policy.budget is not None for layer in cache.layers):
        return "the spec evicts, and would take what is computed again for the newest; use keep_all"
    if any(layer.limit is not None for layer in cache.layers):
        return "fixed storage has no room for what is computed again; use @growing"
    if parsed(recompute).mode == "share" and not compares(host):
        return "the model has no second layer to tell what differs; use recompute='boundary:32'"
    return ""


def _why_not(segment: BlockTokens, host: Host, cache: ModelCache, budget: int | None) -> str:
    """Why a block cannot be reused; empty if it can."""
    if segment.span is None:
        return ""
    active: Activation | None = cache.activation
    if active is not None and segment.span.stop > active.start:
        return f"an adapter takes over at token {active.start}, and what it computes belongs there"
    if budget is None:
        return ""
    tokens = segment.span.stop - segment.span.start
    nbytes = cache.bytes_of(host.geometries(), tokens)
    if nbytes > budget:
        return f"its {tokens} tokens take {nbytes} bytes, the store holds {budget}"
    return ""


def _report_of(segment: BlockTokens) -> BlockReport:
    start, stop = segment.span or (None, None)
    return BlockReport(segment.text[:_SHOWN], start, stop, segment.refused)
