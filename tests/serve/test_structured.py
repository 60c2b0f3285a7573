"""Structured output: a model of random weights follows what it is given."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from jsonschema import validate
from support.live_server import asking, refusal, said, scripted, serving, small
from support.short_tokenizer import SIZE, short_tokenizer

import kvkeep
from kvkeep.generate.drafting import Drafting
from kvkeep.serve.limits import Limits
from kvkeep.serve.prompts.grammars import Grammars, _Following

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"const": "é"}, "maxItems": 2},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {**SCHEMA}}}
WARM = {"temperature": 1.5, "seed": 1, "max_tokens": 120}
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"


def follows(options, text):
    if "guided_regex" in options:
        return re.fullmatch(options["guided_regex"], text)
    if "guided_choice" in options:
        return text in options["guided_choice"]
    if "guided_grammar" in options:
        return re.fullmatch("(red|blue)!", text)
    validate(json.loads(text), SCHEMA)
    return True


ASKED = [
    {"response_format": STRICT},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"guided_regex": "[a-c]{3}-[0-9]{2}"},
    {"guided_choice": ["yes", "no", "perhaps, é"]},
    {"guided_grammar": 'start: ("red" | "blue") "!"'},
    {"guided_grammar": 'root ::= ("red" | "blue") "!"'},
]


def test_each_answer_of_a_batch_follows_its_own(ask):
    def answer(options):
        found = ask(n=2, extra_body=options, **WARM)
        return [choice.message.content for choice in found.choices], found.choices[0].finish_reason

    with ThreadPoolExecutor(8) as threads:
        both = list(threads.map(answer, [*ASKED, {}]))
    for options, (texts, reason) in zip(ASKED, both, strict=False):
        assert all(follows(options, text) for text in texts), (options, texts)
        assert reason == "stop"
    assert both[-1][1] == "length"


def test_drafts_change_no_answer(tokenizer, monkeypatch):
    """The drafts are what was said without them, with every third token replaced."""
    texts, counts, drafting = {}, Counter(), []

    def propose(self, prompt, tokens, most):
        text, at = texts.setdefault(tuple(prompt.tolist()), []), len(tokens)
        if not drafting:
            text[:] = tokens
            return []
        return [3 + x if (at + i) % 3 == 0 else x for i, x in enumerate(text[at : at + most])]

    def learn(self, drafts, accepted):
        counts.update(accepted=accepted, rejected=drafts - accepted)

    monkeypatch.setattr(Drafting, "propose", propose)
    monkeypatch.setattr(Drafting, "learn", learn)
    tools = {"tools": [TOOL], "tool_choice": "required"}
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + "{# <tool_call> #}")
    with serving(small(), tokenizer, limits=Limits(drafts=4)) as (_, client):

        def answer(numbered):
            number, options = numbered
            fields = {"logprobs": True} | (tools if options is tools else {"extra_body": options})
            talk = asking(f"Number {number}.")
            found = client.chat.completions.create(model="tiny", messages=talk, **fields, **WARM)
            (choice,) = found.choices
            said = choice.message.model_dump(exclude={"tool_calls": {"__all__": {"id"}}})
            return said, choice.finish_reason, [x.token for x in choice.logprobs.content]

        asked = list(enumerate([*ASKED, {}, tools]))
        with ThreadPoolExecutor(8) as threads:
            plain = list(threads.map(answer, asked))
            drafting.append(True)
            assert list(threads.map(answer, asked)) == plain
    assert counts["accepted"] > 20
    assert counts["rejected"] > 20


def test_drafts_of_generate(monkeypatch):
    """transformers asks about each draft, also behind a rejected one."""
    tokenizer, model, returned = short_tokenizer(), small(), []
    grammars = Grammars(tokenizer, SIZE, {2})
    consumes = _Following._consumes

    def noted(self, text):
        returned.append(len(text) < len(self._consumed))
        return consumes(self, text)

    monkeypatch.setattr(_Following, "_consumes", noted)
    prompt = tokenizer("a, b, b, c, a, c, b, a, a, b, c, b, a, c,", return_tensors="pt")

    def generate(**options):
        process = grammars.following("regex", "( [abc],){20}", "guided_regex")()
        torch.manual_seed(1)
        found = model.generate(**prompt, logits_processor=[process], max_new_tokens=99, **options)
        text = tokenizer.decode(found[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
        assert re.fullmatch("( [abc],){20}", text)
        return text

    with kvkeep.attach(model, "h2o:24"):
        plain = generate(do_sample=False)
        generate(do_sample=True, temperature=3.0)
        assert not any(returned)
        assert generate(do_sample=False, prompt_lookup_num_tokens=4) == plain
        generate(do_sample=True, temperature=3.0, prompt_lookup_num_tokens=4)
    assert sum(returned) > 10


def test_a_grammar_is_compiled_once(tokenizer, monkeypatch):
    compiled, original = [], Grammars._compiled
    monkeypatch.setattr(
        Grammars, "_compiled", lambda self, *of: compiled.append(of) or original(self, *of)
    )
    grammars, logits = Grammars(tokenizer, len(tokenizer), {2}), torch.zeros(1, len(tokenizer))
    made = [grammars.following("regex", "a+b", "guided_regex") for _ in range(2)]
    assert len(compiled) == 1
    prompt = torch.tensor([[5]])
    one, other = (make() for make in made)
    begun = one(prompt, logits)
    one(torch.tensor([[5, *tokenizer("a").input_ids]]), logits)
    assert other(prompt, logits).equal(begun)  # what one answer says is not the other's


def test_an_object_of_any_kind(ask, served):
    found = said(ask(extra_body={"response_format": {"type": "json_object"}}, max_tokens=8))
    assert found.startswith("{")
    text = served[1].completions.create(
        model="tiny", prompt="A pet:", extra_body={"guided_json": SCHEMA}, **WARM
    )
    validate(json.loads(text.choices[0].text), SCHEMA)


def test_an_answer_is_a_call_or_follows(ask, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + "{# <tool_call> #}")
    (brace,), (angle,) = tokenizer.encode("{"), tokenizer.encode("<")[:1]
    options = WARM | {"tools": [TOOL], "response_format": STRICT}
    as_text = ask(logit_bias={str(brace): 100}, **options).choices[0].message
    validate(json.loads(as_text.content), SCHEMA)
    assert as_text.tool_calls is None
    as_call = ask(logit_bias={str(angle): 100}, **options).choices[0].message
    (call,) = as_call.tool_calls
    validate(json.loads(call.function.arguments), SCHEMA)


def test_reasoning_comes_before(ask, tokenizer, monkeypatch):
    begin = "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + begin)
    with scripted(tokenizer, "A cat, perhaps.</think>", free=True):
        message = ask(response_format=STRICT, **WARM).choices[0].message
    assert message.reasoning_content == "A cat, perhaps."
    validate(json.loads(message.content), SCHEMA)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"guided_json": {"type": "odd"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "((a|b|.){1,1000}){1,1000}"}, "guided_regex"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "tools": [TOOL]}, "guided_regex"),
        ({"guided_json": "[]", "tools": [TOOL]}, "guided_json"),
    ],
)
def test_what_cannot_be_followed_is_refused(ask, tokenizer, monkeypatch, options, param):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE + "{# <tool_call> #}")
    assert refusal(lambda: ask(extra_body=options))["param"] == param


def test_without_the_package_its_extra_is_named(ask, served, monkeypatch):
    monkeypatch.setattr(served[0].prompts._structured, "_made", None)
    monkeypatch.delitem(sys.modules, "kvkeep.serve.prompts.grammars")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refusal(lambda: ask(extra_body={"guided_regex": "a"}))
    assert "kvkeep[structured]" in error["message"]
    assert error["param"] == "guided_regex"


def test_marks_that_are_special_tokens_stand_for_themselves(tokenizer):
    """Special tokens are written as tokens, not as their letters, also behind reasoning."""
    special = "<empty_output>"
    grammars = Grammars(tokenizer, 49160, {2})
    text = grammars.one_of([(f"a{special}", {"const": 1}, f"{special}b")])
    process = grammars.following("lark", text, "tools", after=special)()
    (mark,) = tokenizer.encode(special)
    script = [*tokenizer.encode("hm"), mark, *tokenizer.encode("a"), mark]
    script += [*tokenizer.encode("1"), mark, *tokenizer.encode("b"), 2]
    ids, logits = [7], torch.zeros(1, 49160)
    for token in script:
        allowed = process(torch.tensor([ids]), logits)[0] == 0
        assert allowed[token]
        assert not allowed[49152:].any()
        ids.append(token)
    assert allowed.nonzero().flatten().tolist() == [2]
