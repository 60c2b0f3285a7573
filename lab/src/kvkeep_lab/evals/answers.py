"""Answers to a prompt through a cache, and how right they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.host import Host, ModelCache
from kvkeep.host.compress import compress, compresses
from kvkeep_lab.evals.forward import Tick, fill
from kvkeep_lab.evals.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """What a model answered, without the words that it was given, and its score from 0 to 1."""

    text: str
    score: float


def answered(
    host: Host,
    tokenizer: Any,
    cache: ModelCache,
    prompt: Prompt,
    chunk: int | None,
    tick: Tick,
    *,
    late: bool = False,
) -> Answer:
    """The greedy answer through an empty cache. It ends when no more text can change its score.
    `late`: the question is fed when the text has been read."""
    ids = prompt.ids.to(host.device)
    if late or compresses(cache):
        text, ids = ids[:, : prompt.text], ids[:, prompt.text :]
        fill(host, cache, text, chunk, tick)
        if compresses(cache):
            compress(host, cache, text, tick=tick)
    ends = host.end_tokens() | {tokenizer.eos_token_id}
    logits = fill(host, cache, ids, chunk, tick)
    answer: list[int] = []
    for left in reversed(range(prompt.steps)):
        token = logits.argmax(dim=-1, keepdim=True)
        answer.append(int(token))
        if answer[-1] in ends or prompt.metric.settled(text_of(tokenizer, answer), prompt.answers):
            break
        if left:
            logits = fill(host, cache, token, None, tick)
    return scored(tokenizer, prompt, answer)


def scored(tokenizer: Any, prompt: Prompt, answer: Sequence[int]) -> Answer:
    """The answer of these tokens."""
    text = text_of(tokenizer, answer)
    return Answer(text, prompt.metric.score(text, prompt.answers))


def text_of(tokenizer: Any, answer: Sequence[int]) -> str:
    """The text of these tokens, without those that end it."""
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    return text
