"""Answer a prompt with a model that is not attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    cache: Specs,
    system: str | None = None,
    raw: bool = False,
    prefill_chunk: int | None = None,
    keep_until: str | None = None,
    compile: bool | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    on_start: OnStart = lambda cache, tokens: None,
    **options: Any,
) -> Answer:
    """Answer `prompt` with an unattached model. The model stays attached afterwards.

    Args:
        cache: the cache's spec.
        system: a system message before the prompt.
        raw: continue the prompt without the chat template.
        prefill_chunk: feed the prompt in chunks of that many tokens; None: 1,024 if the cache has a
            budget, otherwise the whole prompt at once.
        keep_until: never evict the prompt up to this text: see `kvkeep.keep_until`.
        compile: see `kvkeep.attach`.
        on_text: called with each piece of text as it is generated.
        on_start: called before the prompt is read.
        options: see `sampling_params`; `max_new_tokens` is 128 by default, `temperature` 0.

    Raises:
        PromptError: the prompt is empty.
        SpecError, UnsupportedError: the cache's spec, the model or an option is not supported, or
            `keep_until` is not in the prompt.
    """
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    ids = _encode(tokenizer, prompt, system, raw)["input_ids"]
    if keep_until is not None:
        cache = spec_keeping(cache, ids, keep_until, tokenizer)
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


def _encode(tokenizer: Any, prompt: str, system: str | None, raw: bool) -> Any:
    if raw or tokenizer.chat_template is None:
        text = prompt if system is None else f"{system}\n\n{prompt}"
        return tokenizer(text, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
