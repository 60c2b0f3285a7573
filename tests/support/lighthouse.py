"""Prompts for the backend for Mellea: a question over some documents."""

from __future__ import annotations

from typing import Any

from mellea import MelleaSession
from mellea.backends import ModelOption
from mellea.core import CBlock

DOCUMENTS = {
    "built": "The lighthouse of Aldermere was built in 1843 by Ida Brandt, who had lost a ship.",
    "green": "Its keeper, her grandson, painted the tower green, though the harbour forbade it.",
    "storm": "In the storm of 1911 the lamp failed, and he rang the bell by hand for eleven hours.",
}
OPTIONS: dict[str, Any] = {ModelOption.MAX_NEW_TOKENS: 4, "do_sample": False}
QUESTION = "Who built it?"


def marked(*names: str, cache: bool = True) -> dict[str, CBlock]:
    """Some of the documents."""
    return {name: CBlock(DOCUMENTS[name], cache=cache) for name in names}


def ask(
    backend: Any, *names: str, question: str = QUESTION, cache: bool = True, **more: Any
) -> Any:
    """The answer to a question over some documents."""
    context = marked(*names, cache=cache)
    return MelleaSession(backend).instruct(
        question, grounding_context=context, strategy=None, **more
    )


def prompt_of(answer: Any) -> Any:
    """The token ids of an answer's prompt, (n,)."""
    return answer.raw.response.sequences[0, : answer.generation.usage["prompt_tokens"]]
