"""generate_many: the answers to many prompts, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.batch.answer import Answer, Settings
from kvkeep.batch.batch import Batch
from kvkeep.errors import ShapeError
from kvkeep.host import Marker


def generate_many(
    model: Any,
    prompts: Sequence[str | Tensor | Sequence[int]],
    settings: Settings | Sequence[Settings] | None = None,
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
        settings: for all prompts, or one for each.
        n: answers to each prompt.
        keep_until, namespace: see `Batch.add`.
        progress: show a progress bar; None: on a terminal.

    Returns:
        For each prompt, its n answers.

    Raises:
        ShapeError: there are not as many settings as prompts; see also `Batch.add`.
        Exception: whatever ended an answer, such as a logits processor's error.
    """
    batch = Batch(model, tokenizer, **options)
    if isinstance(settings, Sequence) and len(settings) != len(prompts):
        raise ShapeError(f"{len(settings)} settings for {len(prompts)} prompts; give one for each")
    each = list(settings) if isinstance(settings, Sequence) else [settings] * len(prompts)
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
