"""stream: one answer, token by token, through a cache that the caller keeps."""

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
    """Continue a prompt, and yield each token when it is chosen. To stop early, call
    `new.answer.cancel()`. If a forward fails, the cache returns to what it held before that
    forward, unless it evicted tokens.

    Args:
        model: attached.
        prompt: text, or token ids, (n,) or (1, n). Of these, the cache may hold the first.
        params: how to continue it; None: the defaults.
        cache: from `Host.new_cache`; it has one row. At the end it holds the text but its last
            token. With the policy `kvzip`, the prompt but its last token is compressed first.
        tokenizer: turns a prompt of text to token ids, and the answer to text; None: there is no
            text.
        chunk: read the prompt in chunks of this many tokens; None: at once.

    Raises:
        ShapeError: no token, several rows, or the cache holds all of the prompt.
        CapacityError: the answer could exceed the cache's storage.
        SpecError: `chunk` is below 1.
        Exception: whatever ended the answer, such as a logits processor's error.
    """
    batch = Batch(model, tokenizer, sequences=1, chunk=chunk)
    (answer,) = batch.add(prompt, params, reuse=Given(model, cache, chunk))
    while not answer.ended:
        yield from batch.step()
    if answer.error is not None:
        raise answer.error
