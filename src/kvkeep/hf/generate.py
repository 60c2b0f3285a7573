"""Answer a prompt with a model that is not attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.errors import KVKeepError
from kvkeep.generate import Answer, SamplingParams, stream
from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.generation.calls import PREFILL_CHUNK
from kvkeep.hf.sampling_params import sampling_params
from kvkeep.host import Specs
from kvkeep.host.keep_until import keep_until as spec_keeping
from kvkeep.host.progress import OnStart


class PromptError(KVKeepError, ValueError):
    """A prompt is empty, too long, or otherwise invalid."""


@dataclass(frozen=True)
class Question:
    """A prompt's text.

    Args:
        text: the text, not empty.
        system: a system message before it.
        raw: continue the text without the chat template.
        keep_until: never evict the prompt up to this text: see `kvkeep.keep_until`.
    """

    text: str
    system: str | None = None
    raw: bool = False
    keep_until: str | None = None

    def encoded(self, tokenizer: Any) -> Tensor:
        """Token ids (1, n).

        Raises:
            PromptError: the text is empty.
        """
        if not self.text.strip():
            raise PromptError("the prompt is empty; give some text")
        if self.raw or tokenizer.chat_template is None:
            text = self.text if self.system is None else f"{self.system}\n\n{self.text}"
            return cast(Tensor, tokenizer(text, return_tensors="pt")["input_ids"])
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return cast(Tensor, given["input_ids"])

    def spec(self, cache: Specs, ids: Tensor, tokenizer: Any) -> Specs:
        """The specs of a cache for the prompt, whose token ids are `ids`.

        Raises:
            SpecError: `keep_until` is not in the prompt, or a policy cannot keep it.
        """
        if self.keep_until is None:
            return cache
        return spec_keeping(cache, ids, self.keep_until, tokenizer)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    *,
    cache: Specs,
    prefill_chunk: int | None = None,
    compile: bool | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    on_start: OnStart = lambda cache, tokens: None,
    **options: Any,
) -> Answer:
    """Answer a question with an unattached model. The model stays attached afterwards.

    Args:
        cache: the cache's spec.
        prefill_chunk: feed the prompt in chunks of that many tokens; None: 1,024 if the cache has a
            budget, otherwise the whole prompt at once.
        compile: see `kvkeep.attach`.
        on_text: called with each piece of text as it is generated.
        on_start: called before the prompt is read.
        options: see `sampling_params`; `max_new_tokens` is 128 by default, `temperature` 0.

    Raises:
        PromptError: the prompt is empty.
        SpecError, UnsupportedError: the cache's spec, the model or an option is not supported, or
            `keep_until` is not in the prompt.
    """
    ids = question.encoded(tokenizer)
    cache = question.spec(cache, ids, tokenizer)
    options = {"max_new_tokens": 128, "temperature": 0.0} | options
    params = sampling_params(model, ids.shape[1], **options)
    attach(model, cache, compile=compile)
    kept = Cache(model, cache, capacity=ids.shape[1] + params.max_new_tokens)
    on_start(kept, ids.shape[1])
    return follow(model, tokenizer, ids, kept, params, chunk=prefill_chunk, on_text=on_text)


def follow(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    params: SamplingParams,
    *,
    chunk: int | None = None,
    on_text: Callable[[str], None],
) -> Answer:
    """Continue token ids (1, n) with an attached model. The cache may hold the first of them."""
    if chunk is None and any(layer.policy.evicts for layer in cache.layers):
        chunk = PREFILL_CHUNK
    for new in stream(model, ids, params, cache=cache, tokenizer=tokenizer, chunk=chunk):
        if new.text:
            on_text(new.text)
    return new.answer
