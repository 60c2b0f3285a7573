"""Probabilities, penalties and biases, against logits computed directly."""

from __future__ import annotations

import pytest
import torch
from support.live_server import asking, pieces, said

from kvkeep.host import host_of

CHAT = {"model": "tiny", "messages": asking("Hello.")}


@pytest.fixture
def greedy(served, tokenizer):
    """The greedy tokens after a prompt, with each one's logits, from forwards of one sequence; the
    logits may be changed."""

    @torch.inference_mode()
    def answer(ids, most, change=lambda logits, tokens: logits):
        host, tokens, all_logits = host_of(served[0].model), [], []
        cache, row = host.new_cache(), torch.tensor([ids])
        for _ in range(most):
            logits = host.forward(row, cache)[0, -1].float()
            row = change(logits.clone(), tokens).argmax()[None, None]
            tokens.append(int(row))
            all_logits.append(logits)
        return tokens, torch.stack(all_logits)

    return answer


@pytest.fixture
def ids(tokenizer):
    return tokenizer.apply_chat_template(
        CHAT["messages"], add_generation_prompt=True, return_dict=True
    ).input_ids


def test_logprobs_of_chats(served, tokenizer, greedy, ids):
    create = served[1].chat.completions.create
    tokens, logits = greedy(ids, 6)
    best = logits.log_softmax(-1).topk(3)
    options = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answer = create(n=2, **CHAT, **options)
    for choice in answer.choices:
        content = choice.logprobs.content
        assert [one.token for one in content] == [tokenizer.decode([token]) for token in tokens]
        for i, one in enumerate(content):
            assert one.logprob == pytest.approx(float(best.values[i, 0]), abs=1e-4)
            others = [(other.token, other.logprob) for other in one.top_logprobs]
            assert [name for name, _ in others] == [tokenizer.decode([t]) for t in best.indices[i]]
            assert [p for _, p in others] == pytest.approx(best.values[i].tolist(), abs=1e-4)
            assert one.bytes is None or bytes(one.bytes).decode() == one.token
        assert any(one.bytes for one in content)
    streamed = list(create(stream=True, **CHAT, **options))
    parts = [
        one
        for chunk in streamed
        for choice in chunk.choices
        for one in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert [one.token for one in parts] == [one.token for one in content]
    assert [one.logprob for one in parts] == pytest.approx([one.logprob for one in content])
    assert "".join(pieces(streamed)[0]) == said(answer)
    assert create(**CHAT, max_tokens=2).choices[0].logprobs is None
    bare = create(**CHAT, temperature=0, max_tokens=6, logprobs=True).choices[0].logprobs.content
    assert [one.logprob for one in bare] == pytest.approx([one.logprob for one in content])
    assert not any(one.top_logprobs for one in bare)


def test_logprobs_of_completions(served, tokenizer, greedy):
    create = served[1].completions.create
    prompt = [5, 17, 300]
    tokens, logits = greedy(prompt, 5)
    logprobs = logits.log_softmax(-1)
    options = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 5}
    whole = create(logprobs=2, **options).choices[0]
    found = whole.logprobs
    assert found.tokens == [tokenizer.decode([token]) for token in tokens]
    assert found.token_logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    assert found.text_offset == sorted(found.text_offset)
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        assert "\ufffd" in token or whole.text[start:].startswith(token)
    assert create(logprobs=0, **options).choices[0].logprobs.top_logprobs == [{}] * 5
    chunks = [chunk.choices[0] for chunk in create(logprobs=2, stream=True, **options)]
    assert [t for chunk in chunks if chunk.logprobs for t in chunk.logprobs.tokens] == found.tokens


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-2.0, -2.0), (0.5, 0.25)]
)
def test_penalties_are_of_the_answers_own_tokens(
    served, tokenizer, greedy, ids, presence, frequency
):
    def change(logits, tokens):
        for token in set(tokens):
            logits[token] -= presence + frequency * tokens.count(token)
        return logits

    options = {"presence_penalty": presence, "frequency_penalty": frequency}
    answer = served[1].chat.completions.create(
        max_tokens=20, temperature=0, logprobs=True, **CHAT, **options
    )
    tokens, _ = greedy(ids, 20, change)
    found = [one.token for one in answer.choices[0].logprobs.content]
    assert found == [tokenizer.decode([token]) for token in tokens]
    if presence < 0:
        assert tokens != greedy(ids, 20)[0]


def test_biased_and_cut_choices(ask, greedy, tokenizer, ids):
    (first,), _ = greedy(ids, 1)
    assert said(ask(logit_bias={"1234": 100}, max_tokens=3)) == tokenizer.decode([1234] * 3)
    banned = ask(logit_bias={str(first): -100}, max_tokens=1, logprobs=True)
    assert banned.choices[0].logprobs.content[0].token != tokenizer.decode([first])
    warm = {"temperature": 2.0, "seed": 5, "max_tokens": 12}
    greedily = said(ask())
    assert said(ask(**warm)) != greedily
    assert said(ask(**warm, extra_body={"top_k": 1})) == greedily
    assert said(ask(**warm, extra_body={"min_p": 1.0})) == greedily
