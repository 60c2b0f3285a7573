"""Generate text with a kvkeep cache, stream it and measure it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from kvkeep.errors import KVKeepError
from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import OF_GENERATE
from kvkeep.host import Generation, Specs
from kvkeep.host.generation import GenerationOptions, OnStart, TextStream
from kvkeep.host.keep_until import keep_until as spec_keeping


class PromptError(KVKeepError, ValueError):
    """A prompt is empty, too long, or otherwise invalid."""


class _Streamer(BaseStreamer):
    """Passes what transformers generates to a `TextStream`."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._prompt_passed = False

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        if self._prompt_passed:
            self._stream.push(value.flatten().tolist())
        self._prompt_passed = True

    def end(self) -> None:
        """Called after the last token."""
        self._stream.close()


class _Stopped(StoppingCriteria):
    """Stops a generation when `stopped()` returns True."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.stopped(), device=input_ids.device)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    cache: Specs,
    max_new_tokens: int = 128,
    system: str | None = None,
    raw: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    prefill_chunk: int | None = None,
    keep_until: str | None = None,
    compile: bool | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    on_start: OnStart = lambda cache, tokens: None,
) -> Generation:
    """Answer `prompt` with an unattached model. The model stays attached afterwards.

    Args:
        cache: the cache's spec.
        max_new_tokens: most tokens to generate.
        system: a system message before the prompt.
        raw: continue the prompt without the chat template.
        temperature: sampling temperature; 0 is greedy.
        top_p: probability mass of nucleus sampling; used if the temperature is not 0.
        seed: seed for sampling.
        prefill_chunk: feed the prompt in chunks of that many tokens; None: 1,024 if the cache has a
            budget, otherwise the whole prompt at once.
        keep_until: keep the prompt up to this text, whatever else is evicted: see
            `kvkeep.keep_until`.
        compile: see `kvkeep.attach`.
        on_text: called with each piece of text as it is generated.
        on_start: called before the prompt is read; see `GenerationOptions`.

    Raises:
        PromptError: the prompt is empty.
        SpecError, UnsupportedError: the cache's spec or the model is not supported, or `keep_until`
            is not in the prompt.
    """
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    inputs = _encode(tokenizer, prompt, system, raw).to(model.device)
    if keep_until is not None:
        cache = spec_keeping(cache, inputs["input_ids"], keep_until, tokenizer)
    attach(model, cache, compile=compile)
    kept = Cache(model, cache, capacity=inputs["input_ids"].shape[1] + max_new_tokens)
    return follow(
        model,
        tokenizer,
        inputs["input_ids"],
        kept,
        GenerationOptions(
            max_new_tokens, temperature, top_p, seed, prefill_chunk, on_text, on_start=on_start
        ),
    )


def follow(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    options: GenerationOptions,
) -> Generation:
    """Continue token ids (1, n) with an attached model. The cache may hold the first of them."""
    sampling: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling |= {"temperature": options.temperature, "top_p": options.top_p}
    if options.seed is not None:
        torch.manual_seed(options.seed)
    prompt_tokens = ids.shape[1]
    options.on_start(cache, prompt_tokens)
    stream = TextStream(tokenizer, options.on_text)
    start = time.perf_counter()
    run: Any = model.generate
    output = run(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **sampling,
        **{OF_GENERATE: cache},
        max_new_tokens=options.max_new_tokens,
        prefill_chunk_size=options.prefill_chunk,
        streamer=_Streamer(stream),
        stopping_criteria=StoppingCriteriaList([_Stopped(options.stopped)]),
    )
    return stream.generation(start, output, prompt_tokens, cache.stats())


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
