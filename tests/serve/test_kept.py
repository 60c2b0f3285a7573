"""Responses that the server keeps: read again, continued and deleted, by their own client only."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response
from support.live_server import client, refusal, serving, small
from support.openai_types import conforms

from kvkeep.serve.kept import Kept
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.responses import ResponsesRequest

OPTIONS = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}


@pytest.fixture(scope="module")
def both(tokenizer):
    """Two clients of a server that keeps responses."""
    keys = Keys({"a": "ada", "b": "bob"})
    limits = Limits(response_bytes=10**6)
    with serving(small(), tokenizer, keys=keys, key="a", limits=limits) as (_, ada):
        yield ada.responses, client(str(ada.base_url), "b").responses


def test_a_conversation_goes_on_from_a_kept_response(both):
    ada, _ = both
    first = ada.create(input="Hello.", instructions="Be kind.", **OPTIONS)
    second = ada.create(input="And?", previous_response_id=first.id, **OPTIONS)
    assert second.previous_response_id == first.id
    items = [
        {"role": "user", "content": "Hello."},
        *first.output,
        {"role": "user", "content": "And?"},
    ]
    by_hand = ada.create(input=items, **OPTIONS)
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens  # without the instructions
    third = [{"role": "user", "content": "So?"}]
    assert (
        ada.create(input=third, previous_response_id=second.id, **OPTIONS).usage.input_tokens
        == ada.create(input=[*items, *second.output, *third], **OPTIONS).usage.input_tokens
    )


def test_what_is_kept_is_the_answer(both):
    ada, bob = both
    whole = ada.create(input="Hello.", **OPTIONS)
    assert ada.retrieve(whole.id) == whole
    *_, last = ada.create(input="Hello.", stream=True, **OPTIONS)
    assert ada.retrieve(last.response.id) == last.response
    conforms(Response, ada.with_raw_response.retrieve(whole.id).http_response.json())
    assert "whole" not in refusal(lambda: bob.retrieve(whole.id), 404)["message"]
    assert refusal(lambda: bob.delete(whole.id), 404)
    ada.delete(whole.id)
    assert "no response" in refusal(lambda: ada.retrieve(whole.id), 404)["message"]
    for talk, name in ((ada, whole.id), (bob, last.response.id)):
        error = refusal(
            lambda talk=talk, name=name: talk.create(
                input="And?", previous_response_id=name, **OPTIONS
            )
        )
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"


def test_store_false_keeps_nothing(both):
    ada, _ = both
    answer = ada.create(input="Hello.", store=False, **OPTIONS)
    assert refusal(lambda: ada.retrieve(answer.id), 404)


def test_without_the_option_all_is_refused_with_the_remedy(served):
    talk = served[1].responses
    answer = talk.create(input="Hello.", **OPTIONS)
    for call in (
        lambda: talk.create(input="Hello.", store=True, **OPTIONS),
        lambda: talk.create(input="Hello.", previous_response_id=answer.id, **OPTIONS),
        lambda: talk.retrieve(answer.id),
        lambda: talk.delete(answer.id),
    ):
        assert "--responses 100MB" in refusal(call)["message"]
    assert isinstance(answer, openai.types.responses.Response)


def test_the_oldest_make_room():
    kept = Kept(2000)
    request = ResponsesRequest(model="tiny", input="Hello.")
    for index in range(10):
        keep = kept.following(request, "ada")
        keep({"id": f"resp_{index}", "output": [], "text": "a" * 500})
    held = []
    for index in range(10):
        try:
            held.append(kept.response(f"resp_{index}", "ada")["id"])
        except RequestError:
            continue
    assert held == ["resp_7", "resp_8", "resp_9"]
    kept.following(request, "ada")({"id": "resp_large", "output": [], "text": "a" * 5000})
    with pytest.raises(RequestError):
        kept.response("resp_large", "ada")
