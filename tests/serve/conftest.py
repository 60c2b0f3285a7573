"""What tests of the server share."""

from __future__ import annotations

import copy

import pytest
from support.live_server import asking, serving, small
from support.short_tokenizer import short_tokenizer

from kvkeep.serve import pictures


@pytest.fixture(autouse=True)
def unpaced(monkeypatch):
    """Pictures come however long they take, which a busy machine makes long."""
    monkeypatch.setattr(pictures, "_SHARE", 1e9)


@pytest.fixture(scope="module")
def tokenizer():
    return copy.deepcopy(short_tokenizer())  # whose template tests change


@pytest.fixture
def model():
    """Of random weights, so its text is of random tokens."""
    return small()


@pytest.fixture(scope="module")
def served(tokenizer):
    with serving(small(), tokenizer) as both:
        yield both


@pytest.fixture
def ask(served):
    """Answers of the tiny model, greedy and short."""

    def answer(text="Hello.", messages=None, **options):
        options = {"model": "tiny", "temperature": 0, "max_tokens": 12} | options
        return served[1].chat.completions.create(messages=messages or asking(text), **options)

    return answer
