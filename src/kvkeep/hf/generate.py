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
from kvkeep.host import Generation, Specs

_INCOMPLETE = "\ufffd"
"""The replacement character, which a tokenizer returns for an incomplete character."""


class PromptError(KVKeepError, ValueError):
    """A prompt is empty, too long, or otherwise invalid."""


class _Streamer(BaseStreamer):
    """Passes text on as soon as later tokens cannot change it, in complete characters, and records
    the time of each token.

    A tokenizer may decode a token differently at the start of a text. So the text of a new token is
    found by decoding it together with the previous piece and removing that piece's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.times: list[float] = []
        self._ids: list[int] = []
        self._start = self._given = 0  # the previous piece is the ids from start to given
        self._prompt_passed = False

    def put(self, value: Tensor) -> None:
        """Called with the prompt first, and then with each token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        self.times.append(time.perf_counter())
        self._ids += value.flatten().tolist()
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            self._start, self._given = self._given, len(self._ids)
            self.on_text(text)

    def end(self) -> None:
        """Called after the last token; an incomplete character is dropped."""
        text = self._new_text().rstrip(_INCOMPLETE)
        if text:
            self.on_text(text)

    def _new_text(self) -> str:
        tokenizer: Any = self.tokenizer
        last = self._ids[self._start : self._given]
        before: str = tokenizer.decode(last, skip_special_tokens=True)
        text: str = tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        return text[len(before) :]


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
    on_text: Callable[[str], None] = lambda _: None,
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
        on_text: called with each piece of text as it is generated.

    Raises:
        PromptError: the prompt is empty.
        SpecError, UnsupportedError: the cache's spec or the model is not supported.
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
    """Continue token ids (1, n) with an attached model. The cache may hold the first of them.

    Args:
        stopped: called after each token; True ends the text with that token.
    """
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
        stopping_criteria=StoppingCriteriaList([_Stopped(stopped)]),
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
