"""generate_many: answers to many prompts, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.errors import ShapeError
from kvkeep.generate.answer import Answer
from kvkeep.generate.batch import Batch
from kvkeep.generate.sampling import SamplingParams
from kvkeep.host import Marker


def generate_many(
    model: Any,
    prompts: Sequence[str | Tensor | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Any = None,
    n: int = 1,
    keep_until: Marker | None = None,
    namespace: str | None = "",
    progress: bool | None = None,
    **options: Any,
) -> list[list[Answer]]:
    """Answer many prompts at once.

    Args:
        model, tokenizer, options: see `Batch`.
        prompts: texts, or token ids.
        params: sampling parameters for all prompts, or one object for each.
        n: answers to each prompt.
        keep_until, namespace: see `Batch.add`.
        progress: show a progress bar; None: on a terminal.

    Returns:
        The n answers to each prompt.

    Raises:
        ShapeError: `params` and `prompts` differ in length; see also `Batch.add`.
        Exception: the error that ended an answer, such as a logits processor's.
    """
    batch = Batch(model, tokenizer, **options)
    if isinstance(params, Sequence) and len(params) != len(prompts):
        raise ShapeError(f"{len(params)} params for {len(prompts)} prompts; give one for each")
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    answers = [
        batch.add(prompt, own, n=n, keep_until=keep_until, namespace=namespace)
        for prompt, own in zip(prompts, each, strict=True)
    ]
    disable = None if progress is None else not progress
    ended = tqdm(batch, desc="Answers", total=n * len(prompts), unit="answer", disable=disable)
    for answer in ended:
        if answer.error is not None:
            raise answer.error
    batch.flush()
    return answers
