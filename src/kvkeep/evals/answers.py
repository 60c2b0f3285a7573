"""Answers to a prompt through a cache, and how right they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.evals.forward import Tick, fill
from kvkeep.evals.prompts import Prompt
from kvkeep.host import Host, ModelCache
from kvkeep.host.compress import compress, compresses


def answered(
    host: Host,
    tokenizer: Any,
    cache: ModelCache,
    prompt: Prompt,
    chunk: int | None,
    tick: Tick,
    *,
    late: bool = False,
) -> float:
    """The score of the greedy answer through an empty cache. `late`: the question is fed when the
    text has been read."""
    ids = prompt.ids.to(host.device)
    if late or compresses(cache):
        text, ids = ids[:, : prompt.text], ids[:, prompt.text :]
        fill(host, cache, text, chunk, tick)
        if compresses(cache):
            compress(host, cache, text, tick=tick)
    logits = fill(host, cache, ids, chunk, tick)
    answer: list[int] = []
    for left in reversed(range(prompt.steps)):
        token = logits.argmax(dim=-1, keepdim=True)
        answer.append(int(token))
        if score(tokenizer, prompt, answer) == 1 or answer[-1] == tokenizer.eos_token_id:
            break
        if left:
            logits = fill(host, cache, token, None, tick)
    return score(tokenizer, prompt, answer)


def score(tokenizer: Any, prompt: Prompt, answer: Sequence[int]) -> float:
    """The share of what should be in an answer that is in its text, as RULER counts it: in capital
    letters or not, and numbers with commas or without."""
    text = tokenizer.decode(answer).lower()
    text += text.replace(",", "")
    return sum(wanted.lower() in text for wanted in prompt.answers) / len(prompt.answers)
