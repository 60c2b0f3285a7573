"""Tools: histories with calls, calls in answers, and calls that are asked for."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from jsonschema import validate
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.live_server import refusal, scripted

from kvkeep.serve.prompts.formats import response_template
from kvkeep.serve.prompts.parts import Call, Parts, Said
from kvkeep.serve.prompts.rendering import Rendering
from kvkeep.serve.requests.completions import ChatCompletionRequest
from kvkeep.serve.requests.messages import Message, for_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}, "place": {"enum": ["Skye", "Rum"]}},
            "required": ["days", "place"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "additionalProperties": False}
TIDE = {"type": "function", "function": {"name": "tide", "parameters": NOTHING}}
USER = [{"role": "user", "content": "Rain?"}]
EACH = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.id }}:{{ c.function.name }}"
    "({{ c.function.arguments | tojson }})>{% endfor %}"
    "{% if m.role == 'tool' %}<{{ m.tool_call_id }}:{{ m.name }}>{% endif %}{% endfor %}"
)
HERMES = EACH + "{# <tool_call> #}"


# -- histories -----------------------------------------------------------------------------------


def call(**function):
    return {"id": "a", "type": "function", "function": {"name": "weather", **function}}


def in_history(*messages):
    return for_template([Message.model_validate(message) for message in messages])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", {}),
        ("{}", {}),
        (None, {}),
        ({"place": "Skye"}, {"place": "Skye"}),
        ('{"place": "Skye"}', {"place": "Skye"}),
        ('{"place": "Sk', {"place": "Sk"}),
        ('{"days": 3, "pla', {"days": 3}),
        ('{"days": [1, 2', {"days": [1, 2]}),
        ("Skye", "Skye"),
        ('["Skye"]', '["Skye"]'),
    ],
)
def test_arguments_as_clients_write_them(given, read):
    (message,) = in_history({"role": "assistant", "tool_calls": [call(arguments=given)]})
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": read}


def test_calls_without_names_and_ids():
    several = [call(arguments="{}") | {"id": key} for key in (None, "b", None)]
    several[2]["function"]["name"] = None
    asked, *results = in_history(
        {"role": "assistant", "content": None, "tool_calls": several, "refusal": None},
        {"role": "tool", "content": "one", "tool_call_id": None},
        {"role": "tool", "content": "two", "tool_call_id": "b", "name": None},
        {"role": "tool", "content": [{"type": "text", "text": "three"}]},
    )
    ids = [one["id"] for one in asked["tool_calls"]]
    assert ids[1] == "b"
    assert len(set(ids)) == 3
    assert asked["content"] == ""
    assert [one["tool_call_id"] for one in results] == ids
    assert [one.get("name") for one in results] == ["weather", "weather", None]
    assert [one["content"] for one in results] == ["one", "two", "three"]


def test_functions_as_they_were_before_tools():
    asked, result = in_history(
        {"role": "assistant", "function_call": {"name": "tide", "arguments": "{}"}},
        {"role": "function", "name": "tide", "content": "low"},
    )
    assert asked["tool_calls"][0]["function"] == {"name": "tide", "arguments": {}}
    assert (result["role"], result["name"]) == ("tool", "tide")
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_answers_of_any_server_are_sent_back():
    given = {"role": "assistant", "content": "Yes.", "refusal": None, "annotations": []}
    given |= {"audio": None, "function_call": None, "tool_calls": None, "provider_fields": {"a": 1}}
    assert in_history(given | {"reasoning": "Hm."}) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    ]


# -- formats -------------------------------------------------------------------------------------

JSON = '{"name": "weather", "%s": {"days": 3, "place": "Skye"}}'
XML = "<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=place>\nSkye\n</parameter>"
CALL = JSON % "parameters"
FORMATS = {
    "hermes": ("<tool_call>", [f"<tool_call>\n{JSON % 'arguments'}\n</tool_call>"] * 2, "\n"),
    "qwen-xml": (
        "<tool_call> <function=",
        [f"<tool_call>\n{XML}\n</function>\n</tool_call>"] * 2,
        "\n",
    ),
    "mistral": ("[TOOL_CALLS]", [f"[TOOL_CALLS] [{JSON % 'arguments'}, {JSON % 'arguments'}]"], ""),
    "mistral-args": (
        "[TOOL_CALLS] [ARGS]",
        ['[TOOL_CALLS]weather[ARGS]{"days": 3, "place": "Skye"}'] * 2,
        "",
    ),
    "smollm": (
        "<tool_call>",
        [f"<tool_call>[{JSON % 'arguments'}, {JSON % 'arguments'}]</tool_call>"],
        "",
    ),
    "llama": ('"parameters"', [CALL] * 2, "; "),
    "llama-tag": (
        '"parameters"',
        ["<|python_tag|>" + JSON % "parameters", JSON % "parameters"],
        ";",
    ),
}


def parts_of(tokenizer, template, text, size, tools=("weather",), most=None):
    form = response_template(template, tools=True)
    parser = tokenizer.get_response_parser(form, prefix="", tools=[WEATHER])
    closed = form["fields"]["tool_calls"]["content"] != "json"
    parts = Parts(parser, tools, most_calls=most, closed=closed)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [one for piece in pieces for one in parts.push(piece, last=False)]
    found += parts.push("", last=True)
    said = "".join(one.text for one in found if isinstance(one, Said))
    return said, [one for one in found if isinstance(one, Call)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_however_they_are_written(tokenizer, name, size):
    mark, calls, between = FORMATS[name]
    before = "" if name.startswith("llama") else "Let me look."
    text = before + between + between.join(calls)
    said, found = parts_of(tokenizer, mark, text if before else text.lstrip("; "), size)
    assert said == before
    assert [one.number for one in found] == [0, 1]
    for one in found:
        assert one.name == "weather"
        assert json.loads(one.arguments) == {"days": 3, "place": "Skye"}
        assert len(one.id) == 9
    assert found[0].id != found[1].id
    _, first = parts_of(tokenizer, mark, text if before else text.lstrip("; "), size, most=1)
    assert len(first) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_call_is_text(tokenizer, name):
    mark, calls, _ = FORMATS[name]
    for text in (calls[0][:-15], calls[0]):  # cut off, or of a tool that nobody offered
        tools = ("other",) if text == calls[0] else ("weather",)
        said, found = parts_of(tokenizer, mark, text, 5, tools)
        assert not found
        assert "3" in said
    said, found = parts_of(tokenizer, mark, 'Write {"name": 1} or <b>, [x].', 4)
    assert (said, found) == ('Write {"name": 1} or <b>, [x].', [])


def test_what_a_parser_refuses_is_text(tokenizer):
    calls = {"open": "<t>", "close": "</t>", "content": "json"}
    form = {"start_anchor": "[user]", "fields": {"tool_calls": calls, "content": {}}}
    parts = Parts(tokenizer.get_response_parser(form, prefix="[user]"), ["weather"])
    found = [one for piece in ("a<t>{x", "}</t>b", "c") for one in parts.push(piece, last=False)]
    found += parts.push("d", last=True)
    assert "".join(one.text for one in found) == "a{x}</t>bcd"


# -- answers -------------------------------------------------------------------------------------


@pytest.fixture
def create(served, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", HERMES)

    def answer(**options):
        options = {"model": "tiny", "messages": USER, "max_tokens": 80, "temperature": 0} | options
        return served[1].chat.completions.create(**options)

    return answer


def test_calls_in_answers_and_streams(create, tokenizer):
    text = f"Let me look.\n<tool_call>\n{JSON % 'arguments'}\n</tool_call>"
    with scripted(tokenizer, text):
        answer = create(tools=[WEATHER, TIDE])
        chunks = list(create(tools=[WEATHER, TIDE], stream=True, n=2))
        plain = create()
    ChatCompletion.model_validate(answer.to_dict())
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    (found,) = choice.message.tool_calls
    assert (found.type, found.function.name) == ("function", "weather")
    assert json.loads(found.function.arguments) == {"days": 3, "place": "Skye"}
    assert plain.choices[0].message.tool_calls is None
    assert plain.choices[0].message.content == text
    own = [c.choices[0] for c in chunks if c.choices[0].index == 1]
    deltas = [one for c in own for one in c.delta.tool_calls or []]
    assert [one.index for one in deltas] == [0, 0]
    assert deltas[0].id
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("weather", "")
    assert (deltas[1].id, deltas[1].function.name) == (None, None)
    assert json.loads(deltas[1].function.arguments) == {"days": 3, "place": "Skye"}
    assert "".join(c.delta.content or "" for c in own) == "Let me look."
    assert own[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_is_no_call(create, tokenizer):
    with scripted(tokenizer, f"<tool_call>\n{JSON % 'arguments'}\n</tool_call>"):
        choice = create(tools=[WEATHER], max_tokens=16).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert "weather" in choice.message.content


def test_marks_that_are_special_tokens_are_seen(create, tokenizer, monkeypatch):
    special = "<empty_output>"  # of this tokenizer
    form = {
        "start_anchor": "[user]",
        "fields": {
            "thinking": {"open": special, "close": "!"},
            "content": {"close_pattern": r"<\|im_end\|>"},
        },
    }
    monkeypatch.setattr(tokenizer, "response_template", form)
    with scripted(tokenizer, f"{special}Hm.!Yes."):
        message = create().choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")


FORCED = {
    "hermes": "<tool_call>",
    "qwen-xml": "<tool_call> <function=",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS] [ARGS]",
    "llama": '"parameters"',
    "thinking": "<tool_call> </think>",
}


@pytest.mark.parametrize("name", FORCED)
def test_a_call_that_must_be(create, tokenizer, monkeypatch, name):
    """The model's weights are random, and its answer is a call all the same."""
    template = EACH + "{# " + FORCED[name] + " #}"
    if name == "thinking":
        template += "{% if add_generation_prompt %}<think>{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    named = {"type": "function", "function": {"name": "weather"}}
    thinks = name == "thinking"

    def begun():
        return scripted(tokenizer, "Hm.</think>", free=True) if thinks else nullcontext()

    for choice, names, n in ((named, {"weather"}, 1), ("required", {"weather", "tide"}, 2)):
        options = {"temperature": 1.0, "seed": 1, "n": n, "max_tokens": 300}
        with begun():
            answer = create(tools=[WEATHER, TIDE], tool_choice=choice, **options)
        for one in answer.choices:
            (found,) = one.message.tool_calls
            assert found.function.name in names
            arguments = json.loads(found.function.arguments)
            if found.function.name == "weather":
                assert set(arguments) == {"days", "place"}
                assert arguments["place"] in ("Skye", "Rum")


def test_calls_that_cannot_be_forced(create, tokenizer, monkeypatch):
    def param(**options):
        return refusal(lambda: create(**options))["param"]

    unknown = {"type": "function", "function": {"name": "other"}}
    assert param(tool_choice="required") == "tool_choice"
    assert param(tools=[TIDE], tool_choice=unknown) == "tool_choice"
    forced = {"tools": [TIDE], "tool_choice": "required"}
    assert param(**forced, extra_body={"ignore_eos": True}) == "ignore_eos"
    assert param(**forced, extra_body={"min_tokens": 3}) == "min_tokens"
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}
    assert param(tools=[wrong], tool_choice="required") == "tools"
    monkeypatch.setattr(tokenizer, "chat_template", EACH)
    assert param(**forced) == "tool_choice"


def test_schemas_refer_to_their_own_definitions_and_are_closed(create):
    schema = {"properties": {"place": {"$ref": "#/$defs/place"}}, "required": ["place"]}
    schema |= {"$defs": {"place": {"enum": ["Skye", "Rum"]}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    (choice,) = create(tools=[tool], tool_choice="required").choices
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    validate(arguments, schema)
    assert set(arguments) == {"place"}


KINDS = {
    "type": "object",
    "properties": {
        "count": {"type": ["integer", "null"]},
        "note": {"type": "string", "minLength": 2, "maxLength": 4},
        "where": {"$ref": "#/$defs/place", "type": "object"},
        "unit": {"const": "mm"},
        "perhaps": {"type": "boolean"},
    },
    "required": ["count", "note", "where", "unit"],
    "$defs": {
        "place": {
            "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def test_parameters_of_each_kind_in_xml(create, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", EACH + "{# <tool_call> <function= #}")
    tool = {"type": "function", "function": {"name": "measure", "parameters": KINDS}}
    options = {"tools": [tool], "tool_choice": "required", "temperature": 1.0, "max_tokens": 400}
    seen = set()
    for choice in create(n=8, seed=2, **options).choices:
        assert choice.message.tool_calls, choice
        (found,) = choice.message.tool_calls
        arguments = json.loads(found.function.arguments)
        validate(arguments, KINDS)
        assert arguments["unit"] == "mm"
        seen.add("perhaps" in arguments)
    assert seen == {True, False}
    for wrong in ({}, {"type": "string", "format": "date"}, {"type": ["string", "null"]}):
        function = {"name": "f", "parameters": {"properties": {"day": wrong}}}
        error = refusal(
            lambda function=function: create(
                tools=[{"type": "function", "function": function}], tool_choice="required"
            )
        )
        assert error["param"] == "tools"
        assert error["message"].startswith("f.day")


def test_a_template_without_tools_gets_them_in_its_messages(create, tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    )
    called = {"role": "assistant", "content": None, "tool_calls": [call(arguments="{}")] * 2}
    result = {"role": "tool", "tool_call_id": "a", "content": "Rain."}
    talk = [{"role": "system", "content": "Be kind."}, *USER, called, result, result]
    rendering = Rendering(tokenizer, "tiny", 10**6)
    request = ChatCompletionRequest(model="tiny", messages=[*talk, *USER], tools=[WEATHER])
    text = rendering.render(request).text
    assert text.startswith("[system]You can call these functions:\n")
    assert json.dumps(WEATHER["function"]) in text
    assert "</tool_call>\n\nBe kind.[user]Rain?[assistant]<tool_call>" in text
    written = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert text.endswith(
        f"[assistant]{written}\n{written}[user]<tool_response>\nRain.\n</tool_response>\n\n"
        "<tool_response>\nRain.\n</tool_response>\n\nRain?"
    )
    with scripted(tokenizer, said := f"<tool_call>{JSON % 'arguments'}</tool_call>"):
        assert create(tools=[WEATHER]).choices[0].message.tool_calls[0].function.name == "weather"
        assert create().choices[0].message.content == said
    (found,) = create(tools=[WEATHER], tool_choice="required", max_tokens=300).choices
    assert found.message.tool_calls[0].function.name == "weather"
