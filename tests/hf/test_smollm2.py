"""The real model: 64 greedy tokens are the same for every exact cache, alone and as a batch."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny
from transformers import DynamicCache

import kvkeep

NEW = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\nI am writing to complain about",
    "Water boils at 100 degrees because the molecules, once they have enough energy, can leave",
)
INPUTS = (*range(len(PROMPTS)), "left")
FEW = 12
CASES = [("keep_all@growing", "left", FEW)]
MORE = [
    ("keep_all@fixed", 0),
    ("keep_all@concat", 1),
    ("dynamic", 2),
    *(("keep_all@growing", which) for which in INPUTS),
    *((name, "left") for name in ("keep_all@fixed", "keep_all@concat", "dynamic")),
    ("keep_all@growing", "right"),
]
CASES += [pytest.param(*case, NEW, marks=pytest.mark.slow) for case in MORE]


def encode(tokenizer, which):
    if isinstance(which, int):
        return tokenizer(PROMPTS[which], return_tensors="pt")
    tokenizer.padding_side = which
    return tokenizer(list(PROMPTS), return_tensors="pt", padding=True)


def generate(model, inputs, new=NEW, **options):
    return model.generate(
        **inputs, min_new_tokens=new, max_new_tokens=new, do_sample=False, **options
    )


def likeliest_without_cache(model, inputs, text, new=NEW):
    """What the model itself would have said at each new token of text, by one forward over it."""
    mask = inputs["attention_mask"]
    place = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)  # as generate() has it:
    place = torch.cat(
        [place, place[:, -1:] + torch.arange(1, new + 1)], dim=1
    )  # a text goes on from its last column
    mask = torch.cat([mask, torch.ones_like(text[:, -new:])], dim=1)
    fed = {"attention_mask": mask, "position_ids": place, "logits_to_keep": new + 1}
    with torch.inference_mode():
        logits = model(text, **fed, use_cache=False).logits
        logits[..., model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
        return logits[:, :-1].argmax(dim=-1)


def new_cache(model, name):
    return DynamicCache(config=model.config) if name == "dynamic" else kvkeep.Cache(model, name)


@pytest.mark.parametrize(("name", "which", "new"), CASES)
def test_attached(smollm2, name, which, new):
    model, tokenizer = smollm2
    inputs = encode(tokenizer, which)
    with kvkeep.attach(model):
        text = generate(model, inputs, new, past_key_values=new_cache(model, name))
    assert text[:, -new:].equal(likeliest_without_cache(model, inputs, text, new))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [("keep_all@growing", 0), ("keep_all@fixed", "left")])
def test_unattached(smollm2, name, which):
    model, tokenizer = smollm2
    inputs = encode(tokenizer, which)
    text = generate(model, inputs, past_key_values=new_cache(model, name))
    assert text[:, -NEW:].equal(likeliest_without_cache(model, inputs, text))


@pytest.mark.parametrize("which", [3, "left", "right"])
def test_one_forward_says_what_generating_without_a_cache_says(smollm2, which):
    """Of any model, so of a tiny one."""
    model = tiny("llama", vocab_size=49152, eos_token_id=2)
    inputs = encode(smollm2[1], which)
    text = generate(model, inputs, use_cache=False)
    assert text[:, -NEW:].equal(likeliest_without_cache(model, inputs, text))


@torch.inference_mode()
def test_chat_is_fluent(smollm2):
    from kvkeep.hf.generate import Question
    from kvkeep.hf.generate import generate as answer

    model, tokenizer = smollm2
    try:
        question = Question("What is the capital of France?")
        result = answer(model, tokenizer, question, cache="keep_all")
    finally:
        kvkeep.detach(model)
    assert "Paris" in result.text
    assert result.reason == "stop"
    assert result.stats.length == len(result.ids) - 1
