"""Bodies of requests: their types, defaults and refusals."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.completions import ChatCompletionRequest, CompletionRequest

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}]}
TEXT = {"model": "tiny", "prompt": "Hello."}


def chat(**options):
    return read(json.dumps(HELLO | options).encode(), ChatCompletionRequest)


def completion(**options):
    return read(json.dumps(TEXT | options).encode(), CompletionRequest)


@pytest.mark.parametrize("parse", [chat, completion])
def test_null_is_the_default(parse):
    kind, required = type(parse()), {"model", "messages", "prompt"}
    names = {field.alias or name for name, field in kind.model_fields.items()} - required
    assert parse(**dict.fromkeys(names)) == parse()


@pytest.mark.parametrize("name", ["guided_regexp", "prompt", "truncate_prompt_tokens"])
def test_unknown_fields_are_named(name):
    with pytest.raises(RequestError, match=f"^{name} is not a field") as caught:
        chat(**{name: 1})
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"model": 1}, "model"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"seed": 10**400}, "seed"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"é": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_value_of_another_type_is_refused(parse, options, param):
    with pytest.raises(RequestError, match=rf"^{param}\b.* is .*: ") as caught:
        parse(**options)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_vllms_way_to_turn_top_k_off():
    assert chat(top_k=-1).params(10, 20, {2}).top_k == 0


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_what_sampling_refuses_names_its_option(name):
    with pytest.raises(RequestError, match=f"{name} is -2.* give a number from 0") as caught:
        chat(**{name: -2}).params(10, 20, {2})
    assert caught.value.param == name


def test_logprobs_of_both_kinds():
    assert chat(top_logprobs=0).top_logprobs is None
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).top_logprobs == 3
    assert completion().top_logprobs is None
    assert completion(logprobs=0).top_logprobs == 0
    params = completion(logprobs=2).params(10, 20, {2})
    assert (params.logprobs, params.top_logprobs) == (True, 2)


def test_sampling_params():
    given = {"temperature": 1e-9, "top_k": 3, "seed": 7, "stop": "a"}
    params = completion(max_tokens=5.0, **given).params(10, 4, {2})
    assert (params.max_new_tokens, params.stop) == (4, ["a"])
    assert (params.temperature, params.top_k, params.seed) == (0, 3, 7)
    assert not params.processors
    changed = completion(presence_penalty=1, logit_bias={"5": 1}).params(10, 4, {2})
    assert len(changed.processors) == 2
    assert params.end_tokens == {2}
    assert completion(stop_token_ids=[5], ignore_eos=True).params(10, 4, {2}).end_tokens == {5}
    with pytest.raises(RequestError, match="min_tokens is 5, but an answer has at most 4"):
        completion(min_tokens=5).params(10, 4, {2})


def test_the_newer_name_of_a_limit_is_preferred():
    assert chat().max_tokens is None
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert completion().max_tokens == 16


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, HELLO | {"messages": [1] * 1000}),
        (ChatCompletionRequest, HELLO | {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatCompletionRequest, HELLO | {"tools": [1] * 1000}),
        (ChatCompletionRequest, HELLO | {"stop": [1] * 1000}),
        (ChatCompletionRequest, HELLO | {"logit_bias": {str(i): "" for i in range(2000)}}),
        (CompletionRequest, TEXT | {"prompt": [1, *([""] * 1000)]}),
    ],
)
def test_a_list_of_errors_is_not_collected(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 6


def test_a_request_without_its_prompt():
    for request in (chat(tools=[{"function": {"name": "f"}}]), completion()):
        left = request.without_prompt()
        assert not getattr(left, request.prompt_field)
        assert not getattr(left, "tools", None)
        assert left.model == "tiny"
        assert getattr(request, request.prompt_field)
