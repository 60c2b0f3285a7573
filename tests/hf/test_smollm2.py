"""The real model: 64 greedy tokens are the same for every exact cache, alone and as a batch."""

from __future__ import annotations

import pytest
import torch
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
CACHES = ("keep_all@growing", "keep_all@fixed", "keep_all@concat", "dynamic")
INPUTS = (*range(len(PROMPTS)), "left", "right")


def encode(tokenizer, which):
    if isinstance(which, int):
        return tokenizer(PROMPTS[which], return_tensors="pt")
    tokenizer.padding_side = which
    return tokenizer(list(PROMPTS), return_tensors="pt", padding=True)


def generate(model, inputs, **options):
    return model.generate(
        **inputs, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False, **options
    )


@pytest.fixture(scope="module")
def uncached(smollm2):
    model, tokenizer = smollm2
    return {which: generate(model, encode(tokenizer, which), use_cache=False) for which in INPUTS}


def new_cache(model, name):
    return DynamicCache(config=model.config) if name == "dynamic" else kvkeep.Cache(model, name)


@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("name", CACHES)
def test_attached(smollm2, uncached, which, name):
    model, tokenizer = smollm2
    with kvkeep.attach(model):
        cache = new_cache(model, name)
        text = generate(model, encode(tokenizer, which), past_key_values=cache)
    assert text.equal(uncached[which])


@pytest.mark.parametrize("which", [0, "left"])
@pytest.mark.parametrize("name", ["keep_all@growing", "keep_all@fixed"])
def test_unattached(smollm2, uncached, which, name):
    model, tokenizer = smollm2
    text = generate(model, encode(tokenizer, which), past_key_values=new_cache(model, name))
    assert text.equal(uncached[which])


def test_left_padded_rows_equal_rows_alone(smollm2, uncached):
    for row in range(len(PROMPTS)):
        assert uncached["left"][row, -NEW:].equal(uncached[row][0, -NEW:])


@torch.inference_mode()
def test_chat_is_fluent(smollm2):
    from kvkeep.hf.generate import generate as answer

    model, tokenizer = smollm2
    try:
        result = answer(model, tokenizer, "What is the capital of France?", cache="keep_all")
    finally:
        kvkeep.detach(model)
    assert "Paris" in result.text
    assert result.tokens < 128  # it stopped by itself
    assert result.cache.length == result.prompt_tokens + result.tokens - 1
