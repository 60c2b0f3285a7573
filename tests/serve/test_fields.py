"""Each field of a request: what it changes, and the table that tells."""

from __future__ import annotations

import json

import httpx2
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ItemParams
from support.field_table import KINDS, fields, parts, table
from support.live_server import JSON, asking, scripted

FUNCTION = {"name": "weather", "parameters": {}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
TEMPLATE = (  # <tool_call>
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ reasoning_effort }}"
    "{{ enable_thinking }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

WARM = {"temperature": 2.0, "seed": 5}
LONG = {"max_tokens": 14}
MANY = {"max_tokens": 40, "logit_bias": {"2": 100}}  # an end token at once
CHANGES = {
    "messages": {"messages": asking("Goodbye.")},
    "prompt": {"prompt": [5, 6]},
    "max_tokens": {"max_tokens": 3.0},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "min_tokens": ({**MANY}, {"min_tokens": 3}),
    "temperature": ({"seed": 5}, {"temperature": 2.0}),
    "seed": (WARM, {"seed": 6}),
    "top_p": (WARM, {"top_p": 0.0}),
    "top_k": (WARM, {"top_k": 1}),
    "min_p": (WARM, {"min_p": 1.0}),
    "repetition_penalty": (LONG | {"presence_penalty": -2}, {"repetition_penalty": 9.0}),
    "presence_penalty": (LONG, {"presence_penalty": -2}),
    "frequency_penalty": (LONG, {"frequency_penalty": -2}),
    "logit_bias": {"logit_bias": {"5": 100}},
    "stop": ({"logit_bias": {"1234": 100}}, {"stop": "du"}),
    "stop_token_ids": ({"logit_bias": {"1234": 100}}, {"stop_token_ids": [1234]}),
    "ignore_eos": (MANY, {"ignore_eos": True}),
    "n": {"n": 2},
    "stream": {"stream": True},
    "stream_options": ({"stream": True}, {"stream_options": {"include_usage": True}}),
    "logprobs": {"logprobs": 1},
    "top_logprobs": ({"logprobs": True}, {"top_logprobs": 1}),
    "tools": {"tools": TOOLS},
    "tool_choice": ({"tools": TOOLS}, {"tool_choice": "none"}),
    "parallel_tool_calls": ({"tools": TOOLS, "max_tokens": 60}, {"parallel_tool_calls": False}),
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "response_format": {"response_format": {"type": "json_object"}},
    "guided_json": {"guided_json": {"type": "integer"}},
    "guided_regex": {"guided_regex": "a+"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "echo": {"echo": True},
    "best_of": (WARM | {"n": 2}, {"best_of": 4}),
    "input": {"input": "Goodbye."},
    "instructions": {"instructions": "Be kind."},
    "max_output_tokens": {"max_output_tokens": 3},
    "text": {"text": {"format": {"type": "json_object"}}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "include": {"include": ["message.output_text.logprobs"]},
}
"""Of each field that is honoured, a request, and what is added to it: the answer changes."""

IGNORED = {
    **{"user": "ada", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "a"},
    **{"safety_identifier": "a", "prompt_cache_retention": "24h", "prompt_cache_options": {}},
    "prediction": {"type": "content", "content": "a"},
    **{"max_tool_calls": 3, "background_options": {}},
}
REFUSED = {
    **{"model": "other", "modalities": ["audio"], "verbosity": "low", "store": True, "audio": {}},
    **{"web_search_options": {}, "moderation": {}, "functions": [{}], "function_call": "auto"},
    **{"suffix": "a", "previous_response_id": "a", "conversation": "a", "background": True},
    **{"truncation": "auto", "context_management": [{}], "image": {}, "access_programs": {}},
}
HARMLESS = {
    **{"modalities": ["text"], "verbosity": "medium", "store": False, "functions": []},
    **{"function_call": "none", "response_format": {"type": "text"}, "suffix": ""},
    **{"background": False, "truncation": "disabled", "context_management": []},
}
OWN = {
    "responses": {
        "stream_options": {"include_obfuscation": True},
        "prompt": {"id": "a"},
        "tools": {"tools": [{"type": "function", **FUNCTION}]},
        "top_logprobs": (
            {"include": ["message.output_text.logprobs"]},
            {"top_logprobs": 1},
        ),
        "tool_choice": (
            {"tools": [{"type": "function", **FUNCTION}]},
            {"tool_choice": "none"},
        ),
        "parallel_tool_calls": (
            {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 60},
            {"parallel_tool_calls": False},
        ),
    }
}
"""Of one kind of requests: what it refuses of a field, or what changes its answers."""


GIVEN = {
    "chat": {"messages": asking("Hello."), "max_tokens": 6},
    "completions": {"prompt": "Hello.", "max_tokens": 6},
    "responses": {"input": "Hello.", "max_output_tokens": 6},
}


@pytest.fixture(scope="module")
def http():
    with httpx2.Client(trust_env=False, verify=False) as made:
        yield made


@pytest.fixture
def post(served, http, tokenizer, monkeypatch):
    """Posts a request of one kind; returns the status, and the answer but for what always
    changes."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + CALL)

    def answer(of, **options):
        given = {"model": "tiny", "temperature": 0, **GIVEN[of]}
        if of == "responses" and "max_tokens" in options:
            options["max_output_tokens"] = options.pop("max_tokens")
        if of == "chat" and options.get("logprobs"):
            options["logprobs"] = True
        url = f"{served[1].base_url}{'chat/completions' if of == 'chat' else of}"
        got = http.post(url, json=given | options, headers=JSON)
        if "stream" in got.headers["content-type"]:
            return got.status_code, {"chunks": got.text.count("data:")}
        body = got.json()
        for changing in ("id", "created", "created_at", "completed_at", "metadata"):
            body.pop(changing, None)
        for item in body.get("output", ()):
            item.pop("id")
        for cached in ("prompt_tokens_details", "input_tokens_details"):  # of the store
            (body.get("usage") or {}).pop(cached, None)
        return got.status_code, body

    return answer


def cases():
    return [(of, name) for of, kind in KINDS.items() for name in fields(kind)]


@pytest.fixture(scope="module")
def known():
    """The answers to requests of each kind without further fields."""
    return {}


@pytest.mark.parametrize(("of", "name"), cases())
def test_each_field(post, known, tokenizer, of, name):
    def plain():
        if of not in known:
            known[of] = post(of)
        return known[of]

    own = OWN.get(of, {})
    refused = REFUSED | {each: own[each] for each in ("prompt", "stream_options") if each in own}
    changes = {**CHANGES, **own}
    assert (name in changes) + (name in IGNORED) + (name in REFUSED) == 1
    if name in refused:
        status, body = post(of, **{name: refused[name]})
        assert status == (404 if name == "model" else 400)
        assert body["error"]["param"].partition(".")[0] == name
    elif name in CHANGES:
        both = changes[name]
        before, change = both if isinstance(both, tuple) else ({}, both)
        if name == "parallel_tool_calls":
            with scripted(tokenizer, CALL * 2):
                found = [post(of, **before), post(of, **before, **change)]
        else:
            found = [post(of, **before) if before else plain(), post(of, **before | change)]
        assert [status for status, _ in found] == [200, 200], found
        assert found[0] != found[1]
    if name in IGNORED or name in HARMLESS:
        assert post(of, **{name: (IGNORED | HARMLESS)[name]}) == plain()


def test_fields_that_openai_defines_are_known():
    assert set(ChatParams.__annotations__) <= set(fields(KINDS["chat"]))
    assert set(TextParams.__annotations__) <= set(fields(KINDS["completions"]))
    assert set(ItemParams.__annotations__) <= set(fields(KINDS["responses"]))


def test_the_table_is_current():
    assert parts()[1] == table(), "run PYTHONPATH=tests python -m support.field_table"


def test_an_answer_ends_with_a_token_of_the_client_and_not_before_its_time(served, tokenizer):
    create = served[1].completions.create
    base = {"model": "tiny", "prompt": "Hello.", "temperature": 0, "logit_bias": {"1234": 100}}
    ended = create(**base, logprobs=0, extra_body={"stop_token_ids": [1234], "min_tokens": 4})
    choice = ended.choices[0]
    assert choice.finish_reason == "stop"
    assert ended.usage.completion_tokens == 5
    assert len(choice.logprobs.tokens) == 5
    assert choice.logprobs.tokens[-1] == tokenizer.decode([1234])
    assert choice.text
    assert tokenizer.decode([1234]) not in choice.text


def test_several_prompts(served, tokenizer):
    create = served[1].completions.create
    options = {"model": "tiny", "temperature": 0, "max_tokens": 4, "logprobs": 1}
    texts = ["One, two", "Red", "North, east"]
    each = [create(prompt=text, **options) for text in texts]
    ids = [tokenizer(text).input_ids for text in texts]
    for prompts in (texts, ids):
        answer = create(prompt=prompts, n=2, **options)
        assert [choice.index for choice in answer.choices] == list(range(6))
        found = [choice.text for choice in answer.choices]
        assert found == [one.choices[0].text for one in each for _ in range(2)]
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in each)
        assert answer.usage.completion_tokens == 24
    streamed = {}
    for chunk in create(prompt=texts, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {at: one.choices[0].text for at, one in enumerate(each)}


def test_the_best_of_several_answers(served):
    create = served[1].completions.create
    options = {"model": "tiny", "prompt": "Hello.", "temperature": 1.5, "seed": 4, "max_tokens": 6}

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    every = create(n=4, logprobs=0, **options).choices
    expected = [choice.text for choice in sorted(every, key=mean, reverse=True)][:2]
    answer = create(n=2, best_of=4, **options)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 24
    assert expected != [choice.text for choice in every[:2]]


def test_system_messages_of_templates_without_them(served, tokenizer, ask, monkeypatch):
    def sent(template, messages):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        rendered = []
        encode = tokenizer.__class__.__call__
        monkeypatch.setattr(
            tokenizer.__class__,
            "__call__",
            lambda self, text, **options: rendered.append(text) or encode(self, text, **options),
        )
        ask(messages=messages, max_tokens=1)
        return rendered[-1]

    each = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + each
    silent = (
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    talk = [{"role": "developer", "content": "Be kind. "}, {"role": "user", "content": "Hello."}]
    assert sent(each, talk) == "[system]Be kind. [user]Hello."
    assert sent(each + "{# developer #}", talk) == "[developer]Be kind. [user]Hello."
    for template in (refusing, silent):
        assert sent(template, talk) == "[user]Be kind. \n\nHello."


def test_the_last_message_is_continued(served, tokenizer):
    create = served[1].chat.completions.create
    talk = [*asking("Count."), {"role": "assistant", "content": "One, two"}]
    text = tokenizer.apply_chat_template(talk, continue_final_message=True, tokenize=False)
    assert text.endswith("One, two")
    options = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    answer = create(messages=talk, extra_body={"continue_final_message": True}, **options)
    expected = served[1].completions.create(prompt=tokenizer(text).input_ids, **options)
    assert answer.choices[0].message.content == expected.choices[0].text


def test_variables_of_the_template(post, tokenizer, monkeypatch):
    for given in ({"chat_template": "x"}, {"tokenize": True}, {"other": 1}, {"tools": []}):
        status, body = post("chat", chat_template_kwargs=given)
        assert status == 400
        assert body["error"]["param"] == "chat_template_kwargs"
        assert next(iter(given)) in body["error"]["message"]
    deep = json.loads("[" * 500 + "]" * 500)
    assert post("chat", chat_template_kwargs={"enable_thinking": [deep] * 2})[0] == 400
    monkeypatch.setattr(tokenizer, "chat_template", "{{ enable_thinking }}{{ messages }}")
    off, on = (post("chat", reasoning_effort=effort)[1] for effort in ("none", "high"))
    told = [
        post("chat", chat_template_kwargs={"enable_thinking": think})[1] for think in (False, True)
    ]
    assert [off, on] == told
    assert off != on
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    assert post("chat", reasoning_effort="high")[1]["error"]["param"] == "reasoning_effort"


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ (m.content.split('</think>') | last).strip() }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined %}<think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning(served, tokenizer, monkeypatch, begun):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    create = served[1].chat.completions.create
    options = {"model": "tiny", "messages": asking("Why?"), "max_tokens": 30}
    if begun:
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    text = ("" if begun else "<think>") + "\nLet me see. \n</think>\n\nBecause.\n"
    with scripted(tokenizer, text):
        message = create(**options).choices[0].message
        assert (message.reasoning_content, message.content) == ("Let me see.", "Because.\n")
        deltas = [chunk.choices[0].delta for chunk in create(stream=True, **options)]
        found = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert found == "Let me see."
        assert "".join(delta.content or "" for delta in deltas) == "Because.\n"
        assert sum(bool(delta.content) for delta in deltas) > 1
    with scripted(tokenizer, "Plain <b>text</b>. "):
        message = create(model="tiny", messages=asking("Why?")).choices[0].message
        assert message.content == "Plain <b>text</b>. "
        assert not hasattr(message, "reasoning_content")
