"""Recorded sessions: what the server answers today is what is recorded, and what OpenAI
documents."""

from __future__ import annotations

import pytest
from openai import APIError
from openai.pagination import SyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from support.openai_types import conforms
from support.recorded import SESSIONS, answered, recorded, without_changes

KINDS = {
    "models": SyncPage[Model],
    "model": Model,
    "chat": ChatCompletion,
    "chat_stream": ChatCompletionChunk,
    "completions": Completion,
    "completions_stream": Completion,
    "responses": Response,
    "responses_stream": ResponseStreamEvent,
}
BEYOND = ("reasoning_content",)
"""What OpenAI's types lack, and other servers and their clients know."""


@pytest.fixture(scope="module")
def answers():
    return dict(answered())


@pytest.mark.parametrize("name", SESSIONS)
def test_answers_are_as_recorded(answers, name):
    assert without_changes(answers[name]) == recorded(name)


@pytest.mark.parametrize("name", KINDS)
def test_recordings_are_as_documented(name):
    found = recorded(name)
    each = found if isinstance(found, list) else [found]
    assert each
    for one in each:
        if name == "completions_stream":  # whose type does not tell chunks from whole answers
            one["choices"][0]["finish_reason"] = one["choices"][0]["finish_reason"] or "stop"
        conforms(KINDS[name], one, allowed=BEYOND)


def test_a_refusal_is_as_documented():
    error = recorded("refusal")["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert set(error) - {"message"} <= set(APIError.__annotations__)
