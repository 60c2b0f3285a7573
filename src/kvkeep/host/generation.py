"""Generation: continue a prompt by forwards of one token, and stream the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

_LONGEST_PIECE = 16
"""Tokens after which a piece ends all the same: no character has so many, so the replacement
character belongs to the text."""


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


class _Pieces:
    """A growing text, in pieces that end with complete characters.

    A tokenizer may decode a token differently at the start of a text. So the text of new tokens is
    found by decoding them together with the previous piece and removing that piece's text. The cost
    of a token does not depend on the text's length.

    Args:
        options: of the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, **options: bool) -> None:
        self._decode, self._options = tokenizer.decode, options
        self._last: list[int] = []  # the ids of the previous piece
        self._new: list[int] = []  # those after it

    def push(self, ids: Sequence[int]) -> str:
        """Take the next token ids. Returns the next piece, or "" while it is not complete."""
        self._new += ids
        text = self.rest()
        if not text or (text.endswith(_INCOMPLETE) and len(self._new) < _LONGEST_PIECE):
            return ""
        self._last, self._new = self._new, []
        return text

    def rest(self) -> str:
        """The text of the tokens after the last piece."""
        before: str = self._decode(self._last, **self._options)
        text: str = self._decode(self._last + self._new, **self._options)
        return text[len(before) :]


class TokenTexts:
    """The text of each token of a growing text, special tokens as they are written. Together they
    are the text; a character that several tokens make is the last one's, and the others have
    ""."""

    def __init__(self, tokenizer: Any) -> None:
        self._pieces = _Pieces(tokenizer, clean_up_tokenization_spaces=False)

    def push(self, ids: Sequence[int]) -> list[str]:
        """The texts of the next token ids."""
        return [self._pieces.push([token]) for token in ids]


class TextStream:
    """Passes on text, in complete characters, once later tokens cannot change it, and records the
    time of each token."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.text = ""
        self.times: list[float] = []
        self._pieces, self._on_text = _Pieces(tokenizer, skip_special_tokens=True), on_text

    def push(self, ids: list[int]) -> None:
        """Take the next token ids."""
        self.times.append(time.perf_counter())
        self._pass_on(self._pieces.push(ids))

    def close(self) -> None:
        """Pass on what is left after the last token; an incomplete character is dropped."""
        self._pass_on(self._pieces.rest().rstrip(_INCOMPLETE))

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
        if text:
            self.text += text
            self._on_text(text)


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
