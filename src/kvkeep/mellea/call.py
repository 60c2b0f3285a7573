"""Call: a prompt for Mellea's `generate`, with its blocks, its store and its report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Unpack, final

from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.blocks import BlockReport, Encoded, Report
from kvkeep.context import within
from kvkeep.extras import needed_by
from kvkeep.hf.generation.calls import PREFILL_CHUNK, Settings, settings_of_calls
from kvkeep.host import ModelCache, Specs
from kvkeep.host.compress import compressed_tokens
from kvkeep.mellea.caching import Resolved
from kvkeep.store.prefix import ReadOptions

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.core import GenerateLog, ModelOutputThunk

_KEY = "kvkeep"  # key of the report in an answer's log
_SHOWN = 40  # characters of a block shown in a report
_OTHER = "Mellea's prompt differs from the prompt in which the blocks were found"


@final
class Call:
    """A prompt and its caching options; `generate` uses it as the store for this prompt.

    Args:
        caching: caching options.
        encoded: the prompt's tokens and blocks, if it has marked texts.
        seed: seed of random numbers, if given.

    Attributes:
        report: sources of the prompt's keys and values, set after the prefill.
    """

    def __init__(
        self, caching: Resolved, encoded: Encoded | None = None, seed: int | None = None
    ) -> None:
        self.caching, self.encoded, self.seed = caching, encoded, seed
        self.report: Report | None = None

    def blocks_of(self, prompt: Tensor) -> Encoded | None:
        """The blocks, if `prompt` (n,) is the prompt in which they were found; otherwise None."""
        encoded = self.encoded
        return encoded if encoded and encoded.input_ids[0].equal(prompt.cpu()) else None

    def prefill(
        self, model: PreTrainedModel, tokens: Tensor, **options: Unpack[ReadOptions]
    ) -> ModelCache:
        """A cache of all tokens (n,) but the last."""
        if self.blocks_of(tokens) is not None:
            return self.join(model, spec=options["spec"], capacity=options["capacity"])
        cache, stored = self.caching.store.read(model, tokens[:-1], prompt=tokens, **options)
        self.read(cache, cache.fed, stored)
        return cache

    def prefill_rows(
        self, model: PreTrainedModel, prompts: Sequence[Tensor], **options: Unpack[ReadOptions]
    ) -> ModelCache | None:
        """A cache with a row for each prompt (n,), of the tokens that all prompts start with; None
        if there are too few."""
        return self.caching.store.prefill_rows(model, prompts, **options)

    def join(
        self, model: Any, *, spec: Specs | None = None, capacity: int | None = None
    ) -> ModelCache:
        """A cache of the prompt with its blocks, without the last token."""
        assert self.encoded is not None
        cache, self.report = self.encoded.prefill(
            model,
            store=self.caching.store,
            recompute=self.caching.recompute,
            spec=self.caching.spec if spec is None else spec,
            namespace=self.caching.namespace,
            capacity=capacity,
        )
        return cache

    def read(self, cache: ModelCache, tokens: int, found: int) -> None:
        """Record that `tokens` tokens were read without blocks, `found` of them from the store."""
        compressed = compressed_tokens(cache)
        exact = 0 if compressed else found
        unused = [
            BlockReport(segment.text[:_SHOWN], None, None, _OTHER)
            for segment in ([] if self.encoded is None else self.encoded.blocks)
        ]
        self.report = Report(tokens, exact, found - exact, 0, 0, compressed, 0.0, unused)

    def learn(
        self, model: PreTrainedModel, tokens: Tensor, cache: ModelCache, *, namespace: str
    ) -> int:
        """Store the tokens (n,) of a cache; return the number of stored tokens."""
        return self.caching.store.learn(model, tokens, cache, namespace=namespace)

    def tell(self, answer: ModelOutputThunk[Any], log: GenerateLog | None) -> None:
        """Add the report to an answer and its log."""
        usage = answer.generation.usage
        if self.report is None or log is None:
            return
        log.extra = {**(log.extra or {}), _KEY: self.report}
        if usage is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.report.cached}

    def follow(self, answer: ModelOutputThunk[Any]) -> None:
        """Have the report added to an answer when Mellea has finished it."""
        assert answer._gen.post_process is not None
        answer._gen.post_process = partial(_finish, answer._gen.post_process, self)


async def _finish(
    finish: Callable[[ModelOutputThunk[Any]], Awaitable[None]],
    call: Call,
    answer: ModelOutputThunk[Any],
) -> None:
    await finish(answer)
    call.tell(answer, answer.generate_log)


def report_of(answer: ModelOutputThunk[Any]) -> Report | None:
    """The sources of the keys and values of an answer's prompt. None before the answer is complete,
    or if no store was used."""
    log = answer.generate_log
    report: Report | None = None if log is None else (log.extra or {}).get(_KEY)
    return report


_CALLS: ContextVar[Sequence[Call]] = ContextVar("kvkeep_mellea_calls", default=())


def current_calls() -> Sequence[Call]:
    """The calls that this thread or task is generating, one for each prompt."""
    return _CALLS.get()


@contextmanager
def calling(model: PreTrainedModel, calls: Sequence[Call]) -> Iterator[None]:
    """A context in which `generate` is called for these prompts. Tasks and threads started in it
    inherit the calls."""
    caching = calls[0].caching
    settings = Settings(
        caching.spec,
        calls[0] if caching.reuse else None,
        caching.namespace,
        caching.recompute,
        PREFILL_CHUNK,
    )
    with within(_CALLS, calls), settings_of_calls(model, settings):
        yield
