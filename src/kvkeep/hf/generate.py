"""Generate text through a kvkeep cache, streamed and measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvkeep.cache import CacheStats
from kvkeep.errors import KVKeepError
from kvkeep.hf.attach import attach
from kvkeep.hf.cache import Cache
from kvkeep.hf.specs import Specs


class PromptError(KVKeepError, ValueError):
    """A prompt that cannot be continued."""


@dataclass(frozen=True)
class Generation:
    """What was generated. Times are in seconds; `ttft_s` runs from the call to the first token,
    `tokens_per_s` counts the tokens after it; `ids` (1, n) are the prompt's and the new ones."""

    text: str
    tokens: int
    prompt_tokens: int
    tokens_per_s: float
    ttft_s: float
    cache: CacheStats
    ids: Tensor


class _Streamer(TextStreamer):
    """Hands text on as it comes, and notes when."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.times: list[float] = []
        self._prompt_passed = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_passed:
            self.times.append(time.perf_counter())
        self._prompt_passed = True
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


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
    on_text: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Answer `prompt` with an unattached model, which is attached from then on.

    Args:
        cache: what to keep.
        max_new_tokens: most tokens to generate.
        system: a system message before the prompt.
        raw: continue the prompt as it is, without the chat template.
        temperature: 0 is greedy.
        top_p: nucleus sampling, with a temperature.
        seed: for sampling.
        prefill_chunk: feed the prompt in chunks of that many tokens.
        on_text: given each piece of text as it comes.

    Raises:
        PromptError: the prompt is empty.
        SpecError, UnsupportedError: the cache or the model cannot work.
    """
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    inputs = _encode(tokenizer, prompt, system, raw).to(model.device)
    attach(model, cache)
    kept = Cache(model, cache, capacity=inputs["input_ids"].shape[1] + max_new_tokens)
    return follow(
        model,
        tokenizer,
        inputs["input_ids"],
        kept,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prefill_chunk=prefill_chunk,
        on_text=on_text,
    )


def follow(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    prefill_chunk: int | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Continue ids (1, n) with an attached model, of which the cache may hold the first ones."""
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p}
    if seed is not None:
        torch.manual_seed(seed)
    prompt_tokens = ids.shape[1]
    pieces: list[str] = []

    def collect(text: str) -> None:
        pieces.append(text)
        on_text(text)

    streamer = _Streamer(tokenizer, collect)
    start = time.perf_counter()
    run: Any = model.generate
    output = run(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **sampling,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        prefill_chunk_size=prefill_chunk,
        streamer=streamer,
    )
    tokens = output.shape[1] - prompt_tokens
    first, last = streamer.times[0], streamer.times[-1]
    return Generation(
        text="".join(pieces),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        tokens_per_s=(tokens - 1) / (last - first) if tokens > 1 else 0.0,
        ttft_s=first - start,
        cache=cache.stats(),
        ids=output,
    )


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
