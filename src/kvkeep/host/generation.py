"""Generation: continue a prompt by forwards of one token, and stream the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.cache import CacheStats
from kvkeep.errors import ShapeError
from kvkeep.host.cache import ModelCache
from kvkeep.host.compress import compresses, read
from kvkeep.host.sampling import Sampling, drawn

if TYPE_CHECKING:
    from kvkeep.host.contract import Host

_INCOMPLETE = "\ufffd"
"""The replacement character, which a tokenizer returns for an incomplete character."""


OnStart = Callable[[ModelCache, int], None]


@dataclass(frozen=True)
class GenerationOptions:
    """How to continue a prompt.

    Args:
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_p: probability mass of nucleus sampling; used if the temperature is not 0.
        seed: seed for sampling.
        prefill_chunk: feed the prompt in chunks of that many tokens; None: at once.
        on_text: called with each piece of text as it is generated.
        stopped: called after each token; True ends the text with that token.
        on_start: called before the prompt is read, with the cache that will hold it and the number
            of its tokens.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    prefill_chunk: int | None = None
    on_text: Callable[[str], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
    on_start: OnStart = lambda cache, tokens: None


@dataclass(frozen=True)
class Generation:
    """A generated text. `ttft_s` is the time in seconds from the call to the first token,
    `tokens_per_s` the speed after it; `ids` (1, n) are the prompt's and the new token ids."""

    text: str
    tokens: int
    prompt_tokens: int
    tokens_per_s: float
    ttft_s: float
    cache: CacheStats
    ids: Tensor


class TextStream:
    """Passes on text, in complete characters, once later tokens cannot change it, and records the
    time of each token.

    A tokenizer may decode a token differently at the start of a text. So the text of a new token is
    found by decoding it together with the previous piece and removing that piece's text.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.text = ""
        self.times: list[float] = []
        self._tokenizer, self._on_text = tokenizer, on_text
        self._ids: list[int] = []
        self._start = self._given = 0  # the previous piece is the ids from start to given

    def push(self, ids: list[int]) -> None:
        """Take the next token ids."""
        self.times.append(time.perf_counter())
        self._ids += ids
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            self._start, self._given = self._given, len(self._ids)
            self._pass_on(text)

    def close(self) -> None:
        """Pass on what is left after the last token; an incomplete character is dropped."""
        text = self._new_text().rstrip(_INCOMPLETE)
        if text:
            self._pass_on(text)

    def generation(self, start: float, ids: Tensor, prompt: int, cache: CacheStats) -> Generation:
        """The result of a call that began at `start` and produced ids (1, n), of which the first
        `prompt` are the prompt's."""
        tokens = ids.shape[1] - prompt
        first, last = self.times[0], self.times[-1]
        return Generation(
            text=self.text,
            tokens=tokens,
            prompt_tokens=prompt,
            tokens_per_s=(tokens - 1) / (last - first) if tokens > 1 else 0.0,
            ttft_s=first - start,
            cache=cache,
            ids=ids,
        )

    def _pass_on(self, text: str) -> None:
        self.text += text
        self._on_text(text)

    def _new_text(self) -> str:
        decode, last = self._tokenizer.decode, self._ids[self._start : self._given]
        before: str = decode(last, skip_special_tokens=True)
        text: str = decode(self._ids[self._start :], skip_special_tokens=True)
        return text[len(before) :]


@torch.inference_mode()
def generate(
    host: Host,
    tokenizer: Any,
    ids: Tensor,
    cache: ModelCache,
    options: GenerationOptions,
) -> Generation:
    """`Host.generate`, for hosts that implement `Host.forward` only.

    Raises:
        ShapeError: not one row of ids, no new id among them, or `max_new_tokens` below 1.
    """
    left, prompt, most = ids[:, cache.fed :], ids.shape[1], options.max_new_tokens
    if len(ids) != 1 or not left.numel():
        raise ShapeError(
            f"prompt {tuple(ids.shape)}, of which the cache holds {cache.fed} tokens; give one "
            "row, and at least one token that the cache does not hold"
        )
    if most < 1:
        raise ShapeError(f"max_new_tokens is {most}; give at least 1")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    start, ends = time.perf_counter(), host.end_tokens()
    stream = TextStream(tokenizer, options.on_text)
    options.on_start(cache, prompt)
    if compresses(cache) and prompt > 1:
        read(host, cache, ids[:, :-1], options.prefill_chunk)
        left = ids[:, -1:]
    *before, last = torch.split(left, options.prefill_chunk or left.shape[1], dim=1)
    for chunk in before:
        host.feed(chunk, cache)
    logits = host.forward(last, cache)[:, -1]
    sampling = Sampling(options.temperature, top_p=options.top_p)
    while True:
        token = drawn(logits, sampling)
        ids = torch.cat([ids, token], dim=1)
        stream.push([int(token)])
        if options.stopped() or int(token) in ends or ids.shape[1] - prompt == most:
            break
        logits = host.forward(token, cache)[:, -1]
    stream.close()
    return stream.generation(start, ids, prompt, cache.stats())
