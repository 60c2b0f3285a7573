"""The server's answers, as OpenAI's own client sees them."""

from __future__ import annotations

import json

import pytest
import torch
from support.live_server import CONTEXT, asking, pieces, refusal, said, serving, small
from support.short_tokenizer import SIZE

import kvkeep
from kvkeep.hf.generate import Question, generate


def test_greedy_is_what_generate_says_and_the_next_prompt_begins_with_it(model, tokenizer):
    prompts = [
        tokenizer.apply_chat_template(
            asking(text), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        for text in ("Hello.", "Who?")
    ]
    expected = [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    with serving(model, tokenizer) as (_, talk):
        for found, text, ids, whole in zip(
            (0, 12), ("Hello.", "Who?"), prompts, expected, strict=True
        ):
            answer = talk.chat.completions.create(
                model="tiny", messages=asking(text), temperature=0, max_tokens=12
            )
            new = whole[0, ids.shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True)
            assert said(answer) == text.rstrip("\ufffd")
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (ids.shape[1], len(new))
            assert usage.total_tokens == whole.shape[1]
            cached = usage.prompt_tokens_details.cached_tokens
            assert (cached == 0) if not found else (found < cached < ids.shape[1])
            assert answer.choices[0].finish_reason == "length"


def test_a_stream_is_the_same_text(ask):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(pieces(chunks)[0]) == said(whole)
    assert len(chunks) > 8
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in ask(stream=True))
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop(ask):
    whole = said(ask(max_tokens=40))
    for start, stop in ((5, 9), (11, 12), (20, 40)):
        string = whole[start:stop]
        first = whole.index(string)
        for options in ({"stop": string}, {"stop": ["no such text", string]}):
            answer = ask(max_tokens=40, **options)
            assert said(answer) == whole[:first]
            assert answer.choices[0].finish_reason == "stop"
        chunks = list(ask(max_tokens=40, stop=string, stream=True))
        assert "".join(pieces(chunks)[0]) == whole[:first]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert said(ask(max_tokens=40, stop=whole + "x")) == whole  # held back, then given


def test_the_end_token_ends_it(ask, served):
    model = served[0].model
    tokens = ask().usage.completion_tokens
    logits = model.lm_head.weight.data
    kept = logits[2].clone()
    try:
        logits[2] = 0
        model.generation_config.eos_token_id = [2, *range(100, SIZE)]
        answer = ask("Anything else?")
    finally:
        logits[2], model.generation_config.eos_token_id = kept, 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < tokens


def test_sampling(ask):
    options = {"temperature": 1.0, "max_tokens": 8}
    first = said(ask(seed=7, **options))
    assert said(ask(seed=8, **options)) != first
    assert said(ask(seed=7, **options)) == first
    assert said(ask(seed=7, top_p=0.0, **options)) == said(ask(max_tokens=8))  # the likeliest
    unseeded = {said(ask(**options)) for _ in range(3)}
    assert len(unseeded) == 3
    assert said(ask(seed=7, temperature=1e-12, max_tokens=8)) == said(ask(max_tokens=8))


def test_several_choices(ask):
    options = {"temperature": 1.0, "seed": 3, "n": 3}
    answer = ask(**options)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 36
    found = pieces(ask(stream=True, **options))
    assert ["".join(found[index]) for index in range(3)] == texts
    assert said(ask(**options | {"n": 1})) == texts[0]


def test_conversations_in_every_form(ask):
    text = "You keep a lighthouse. You answer in one short sentence."
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    user = {"role": "user", "content": "Hello.", "name": "ada"}
    for role, content in (("system", parts), ("developer", text)):
        messages = [{"role": role, "content": content}, user]
        answer = ask(messages=messages, user="ada", metadata={"a": "b"})
        assert said(answer) == said(ask())
    first = ask()
    messages = [*asking("Hello."), {"role": "assistant", "content": said(first)}]
    second = ask(messages=[*messages, {"role": "user", "content": "And then?"}])
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_completions(served, tokenizer):
    prompt = "The lighthouse was built in"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"model": "tiny", "temperature": 0}
    create = served[1].completions.create
    whole = create(prompt=prompt, **options)
    assert whole.usage.completion_tokens == 16
    assert whole.object == "text_completion"
    text = whole.choices[0].text
    for same in ([prompt], ids[0].tolist(), ids.tolist()):
        assert create(prompt=same, **options).choices[0].text == text
    assert "".join(c.choices[0].text for c in create(prompt=prompt, stream=True, **options)) == text
    chunks = list(create(prompt=prompt, stream=True, stop=text[4:6], max_tokens=16, **options))
    assert "".join(c.choices[0].text for c in chunks) == text[:4]
    assert chunks[-1].choices[0].finish_reason == "stop"


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.place }})"
    "{% endfor %}{% endfor %}{% if messages[-1].role == 'assistant' %}"
    "{{ raise_exception('nothing to answer') }}{% endif %}"
)


def test_tools(ask, served, tokenizer):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Skye"}'},
    }
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ tools }}" + kept
        error = refusal(lambda: ask(messages=messages))
        assert error["param"] == "tool_calls"
        assert "does not render" in error["message"]
        tokenizer.chat_template = TEMPLATE
        expected = "[user] Rain?[assistant] weather(Skye)[tool] yes"
        seen = ask(messages=messages).usage.prompt_tokens
        assert seen == len(tokenizer(expected).input_ids)
        seen = ask(messages=messages, tools=[TOOL]).usage.prompt_tokens
        assert seen == len(tokenizer(json.dumps([TOOL]) + expected).input_ids)
        assert ask(messages=messages, tools=[TOOL], tool_choice="none").usage.prompt_tokens < seen
        error = refusal(lambda: ask(messages=[{"role": "assistant", "content": "?"}]))
        assert "nothing to answer" in error["message"]
        tokenizer.chat_template = None
        assert "use /v1/completions" in refusal(ask)["message"]
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("cache", ["h2o:24", "window:24,sinks=2", "keep_all@fixed:200"])
def test_other_caches(model, tokenizer, cache):
    prompt = "The lighthouse stands on a rock, and the keeper counts the ships. " * 3
    question = Question(prompt, raw=True)
    expected = generate(model, tokenizer, question, cache=cache, max_new_tokens=8).text
    kvkeep.detach(model)
    with serving(model, tokenizer, cache=cache) as (engine, talk):
        for again in (False, True):
            answer = talk.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=8
            )
            assert answer.choices[0].text == expected
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (cached > 30) == (again and "fixed" in cache)
        assert not engine.why_no_reuse
        assert engine.prompts.context == (200 if "fixed" in cache else CONTEXT)


def without_reuse(kind):
    """A model whose slots no store can take."""
    if kind == "unhashable":
        model = small()
        model.register_buffer("odd", torch.ones(2).to_sparse())
        return model
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"long_factor": [9.0] * 4, "short_factor": [1.0] * 4}
        rope |= {"original_max_position_embeddings": 2048}
    return small(rope_parameters=rope)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unhashable"])
def test_models_that_no_store_takes_are_answered(tokenizer, kind):
    model = without_reuse(kind)
    ids = tokenizer("Hello there.", return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    with serving(model, tokenizer) as (engine, talk):
        assert engine.why_no_reuse
        for _ in range(2):
            answer = talk.completions.create(
                model="tiny", prompt="Hello there.", temperature=0, max_tokens=6
            )
            assert answer.choices[0].text == tokenizer.decode(wanted).rstrip("\ufffd")
            assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_prompt_that_the_store_refuses_is_computed(model, tokenizer):
    options = {"model": "tiny", "prompt": "Hello there.", "temperature": 0, "max_tokens": 6, "n": 2}
    with serving(model, tokenizer) as (engine, talk):
        expected = talk.completions.create(**options)
        engine.model.register_buffer("odd", torch.ones(2).to_sparse())  # no longer to be hashed
        answer = talk.completions.create(**options)
        assert [c.text for c in answer.choices] == [c.text for c in expected.choices]
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
