"""Generate text through a kvkeep cache, streamed and measured."""

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
from kvkeep.host import Generation, Specs
from kvkeep.host.generation import TextStream


class PromptError(KVKeepError, ValueError):
    """A prompt that cannot be continued."""


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
    """Ends a generation from outside."""

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
        prefill_chunk: feed the prompt in chunks of that many tokens; None: of 1,024 where the cache
            has a budget, otherwise at once.
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
    stopped: Callable[[], bool] = lambda: False,
) -> Generation:
    """Continue ids (1, n) with an attached model, of which the cache may hold the first ones.

    Args:
        stopped: asked for each token; when it says so, that one is the last.
    """
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p}
    if seed is not None:
        torch.manual_seed(seed)
    prompt_tokens = ids.shape[1]
    stream = TextStream(tokenizer, on_text)
    start = time.perf_counter()
    run: Any = model.generate
    output = run(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **sampling,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        prefill_chunk_size=prefill_chunk,
        streamer=_Streamer(stream),
        stopping_criteria=StoppingCriteriaList([_Stopped(stopped)]),
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
