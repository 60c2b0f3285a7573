"""stream: generate one answer token by token, through the caller's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvkeep.generate.batch import Batch, NewToken
from kvkeep.generate.reuse import Given
from kvkeep.generate.sampling import SamplingParams
from kvkeep.host import ModelCache


def stream(
    model: Any,
    prompt: str | Tensor | Sequence[int],
    params: SamplingParams | None = None,
    *,
    cache: ModelCache,
    tokenizer: Any = None,
    chunk: int | None = None,
) -> Iterator[NewToken]:
    """Continue a prompt; yield each token when it is chosen. To stop early, call
    `new.answer.cancel()`. If a forward fails, the cache returns to its state before the forward,
    unless it evicted tokens.

    Args:
        model: an attached model.
        prompt: text, or token ids, (n,) or (1, n). The cache may hold its first tokens.
        params: sampling parameters; None: the defaults.
        cache: a cache of one row from `Host.new_cache`. At the end it holds the whole text except
            the last token. With the policy `kvzip`, the prompt except its last token is compressed
            first.
        tokenizer: encodes a text prompt and decodes the answer; None: the answer has no text.
        chunk: read the prompt in chunks of this many tokens; None: at once.

    Raises:
        ShapeError: no token, several rows, or the cache holds all of the prompt.
        CapacityError: the answer could exceed the cache's storage.
        SpecError: `chunk` is below 1.
        Exception: the error that ended the answer, such as a logits processor's.
    """
    batch = Batch(model, tokenizer, sequences=1, chunk=chunk)
    (answer,) = batch.add(prompt, params, reuse=Given(model, cache, chunk))
    while not answer.ended:
        yield from batch.step()
    if answer.error is not None:
        raise answer.error
