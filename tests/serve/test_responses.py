"""Responses: the items of answers, the events that write them, and input as clients send it."""

from __future__ import annotations

import json

import httpx2
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from support.live_server import JSON, asking, refusal, scripted
from support.openai_types import conforms

from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.bodies import read
from kvkeep.serve.requests.responses import ResponsesRequest

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}:{{ c.function.name }}>{% endfor %}{% endfor %}"
    "{# <tool_call> </think> #}"
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Skye", "Rum"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Skye"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def parsed(**options):
    given = {"model": "tiny", "input": "Hello."} | options
    return read(json.dumps(given).encode(), ResponsesRequest)


def messages(*items, **options):
    chat = parsed(input=list(items), **options).chat()
    return [message.model_dump(exclude_defaults=True) for message in chat.messages]


def text(*texts):
    return [{"type": "text", "text": one} for one in texts]


# -- input ---------------------------------------------------------------------------------------


def test_items_are_messages_of_a_chat():
    calls = [
        {"type": "function_call", "call_id": key, "name": "weather", "arguments": given}
        for key, given in (("a", '{"place": "Skye"}'), ("b", ""))
    ]
    thought = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": None}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    said = {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
    answered = {"type": "message", "id": "msg", "role": "assistant", "status": "completed"}
    found = messages(
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        thought,
        answered | {"content": [said]},
        *calls,
        {"type": "function_call_output", "call_id": "a", "output": "Rain."},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "Sun."}],
        },
        answered | {"content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "Yes."},
        instructions="Be brief.",
    )
    functions = [{"name": "weather", "arguments": {"place": "Skye"}}, {"name": "weather"}]
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": text("Rain?")},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": text("Let me look."),
            "tool_calls": [
                {"id": key, "function": one} for key, one in zip("ab", functions, strict=True)
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
        {"role": "tool", "tool_call_id": "b", "content": text("Sun.")},
        {"role": "assistant", "content": text("No.")},
        {"role": "assistant", "content": "Yes."},
    ]


def test_reasoning_begins_a_new_answer_after_calls():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "a", "name": "f"}
    found = messages({"role": "user", "content": "?"}, thought, call, thought, call)
    assert [sorted(one) for one in found[1:]] == [
        ["content", "reasoning_content", "role", "tool_calls"]
    ] * 2


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_odd"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_refused(options, param):
    with pytest.raises(RequestError) as caught:
        parsed(**options).chat()
    error = caught.value.renamed(ResponsesRequest.names)
    assert error.param == param or error.param == "input[0].content[0].type"
    assert (error.param or "").split(".")[0].split("[")[0] in error.message


def test_refusals_have_the_clients_names(served):
    def refused(**options):
        options = {"model": "tiny", "input": "Hello."} | options
        return refusal(lambda: served[1].responses.create(**options))

    error = refused(input="Hello. " * 4096)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "maximum context length" in error["message"]
    assert "input" in error["message"]
    assert "messages" not in error["message"]
    error = refused(max_output_tokens=3, extra_body={"min_tokens": 5})
    assert error["param"] == "min_tokens"
    assert refused(reasoning={"effort": "low"})["param"] == "reasoning"
    assert "reasoning does not" not in refused(reasoning={"effort": "low"})["message"]


# -- answers -------------------------------------------------------------------------------------


@pytest.fixture
def create(served, tokenizer, monkeypatch):
    """Returns a response, and the events of the same one as a stream; each conforms."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)

    def answer(**options):
        given = {"model": "tiny", "input": "Rain?", "temperature": 0, "max_output_tokens": 200}
        given |= options
        with httpx2.Client(trust_env=False) as http:
            url = f"{served[1].base_url}responses"
            whole = http.post(url, json=given, headers=JSON)
            assert whole.status_code == 200, whole.text
            stream = http.post(url, json=given | {"stream": True}, headers=JSON).text
        events = []
        for event in stream.strip().split("\n\n"):
            name, data = (line.partition(": ")[2] for line in event.split("\n"))
            events.append(json.loads(data))
            assert events[-1]["type"] == name
        for event in events:
            conforms(ResponseStreamEvent, event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return conforms(Response, whole.json()), events

    return answer


def rebuilt(events):
    """The items that a stream's events write, piece by piece."""
    items = []
    for event in events:
        kind, at = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert at == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[at]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[at]["content"][0]["text"] += event["delta"]
            if "logprobs" in event:
                items[at]["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            items[at]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert items[at]["content"][0]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert items[at]["arguments"] == event["arguments"]
        elif kind == "output_item.done":
            items[at]["status"] = event["item"]["status"]
            assert items[at]["status"] != "in_progress"
            assert items[at] | {"content": 0} == event["item"] | {"content": 0}
        if at is not None and "item" not in event:
            assert event["item_id"] == items[at]["id"]
    return items


def without_ids(items):
    made = [item if isinstance(item, dict) else item.to_dict() for item in items]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in made]


def test_reasoning_text_and_calls(create, tokenizer):
    said = "<think>Hm. So.</think>\nLet me look." + CALL * 2
    with scripted(tokenizer, said):
        response, events = create(tools=[WEATHER], instructions="Be brief.")
    thought, message, *calls = response.output
    assert thought.content[0].text == "Hm. So."
    assert response.output_text == message.content[0].text == "Let me look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"place": "Skye"})
    ] * 2
    assert calls[0].call_id != calls[1].call_id
    assert response.status == "completed"
    assert response.instructions == "Be brief."
    assert response.tools[0].to_dict() == WEATHER
    usage = response.usage
    assert usage.output_tokens == len(tokenizer.encode(said)) + 1
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    last = events[-1]["response"]
    assert last["usage"]["output_tokens"] == usage.output_tokens
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert without_ids(rebuilt(events)) == without_ids(last["output"])
    assert without_ids(last["output"]) == without_ids(response.output)
    assert sum(event["type"] == "response.output_text.delta" for event in events) > 1


def test_an_answer_is_the_chats(served, create):
    response, events = create(input=asking("Hello."), temperature=1.0, seed=3, max_output_tokens=8)
    chat = served[1].chat.completions.create(
        model="tiny", messages=asking("Hello."), temperature=1.0, seed=3, max_tokens=8
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == events[-1]["response"]["status"] == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_an_answer_may_say_nothing(create, tokenizer):
    with scripted(tokenizer, ""):
        response, events = create()
    assert (response.output_text, response.status) == ("", "completed")
    assert without_ids(rebuilt(events)) == without_ids(response.output)


def test_forced_calls_and_structured_output(create):
    warm = {"temperature": 1.0, "seed": 1, "max_output_tokens": 200}
    for choice in ("required", {"type": "function", "name": "weather"}):
        response, _ = create(tools=[WEATHER], tool_choice=choice, **warm)
        (call,) = response.output
        assert json.loads(call.arguments)["place"] in ("Skye", "Rum")
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    response, _ = create(text={"format": form}, **warm)
    assert isinstance(json.loads(response.output_text)["n"], int)
    assert response.text.format.to_dict() == form


@pytest.mark.parametrize("thinks", [False, True])
def test_logprobs(create, tokenizer, thinks):
    said = "Yes, a map: \U0001f5fa."
    with scripted(tokenizer, ("<think>Hm.</think>" if thinks else "") + said):
        response, events = create(include=["message.output_text.logprobs"], top_logprobs=3)
    *_, message = response.output
    (part,) = message.content
    assert part.text == said
    found = b"".join(bytes(one.bytes) for one in part.logprobs[:-1])
    assert found.decode().strip().endswith(said)
    assert all(len(one.top_logprobs) == 3 for one in part.logprobs)
    streamed = rebuilt(events)[-1]["content"][0]["logprobs"]
    assert [one["token"] for one in streamed] == [
        one.token for one in part.logprobs[: len(streamed)]
    ]
    with scripted(tokenizer, said):
        assert create()[0].output[0].content[0].logprobs == []


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (400, "invalid_prompt")])
def test_an_answer_that_fails(served, create, monkeypatch, status, code):
    engine, client = served
    submit = engine.submit

    def failing(prompts, emit, **options):
        told = []

        def instead(event):
            told.append(event)
            if len(told) < 4:
                emit(event)
            elif len(told) == 4:
                emit(RequestError("max_tokens is wrong", param="max_tokens", status=status))

        return submit(prompts, instead, **options)

    monkeypatch.setattr(engine, "submit", failing)
    asked = {"model": "tiny", "input": "Hello."}
    *_, last = client.responses.create(stream=True, **asked)
    conforms(ResponseStreamEvent, last.to_dict())
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == code
    assert last.response.error.message == "max_output_tokens is wrong"
    error = refusal(lambda: client.responses.create(**asked), status)
    assert error["param"] == "max_output_tokens"
