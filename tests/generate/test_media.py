"""Prompts with images in a batch: answers are those of the model's own `generate`."""

from __future__ import annotations

import pytest
import torch
from support.slow import every
from support.tiny_models import tiny
from support.tiny_multimodal import FIRST_TEXT, MEDIUM, build

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.generate import Batch, SamplingParams, WithMedia

NEW = 6
FAMILIES = ("qwen2_vl", "gemma3", "llava", "qwen3_5", "smolvlm")


def media_of(prompt):
    return {name: x for name, x in prompt.items() if name not in ("input_ids", "attention_mask")}


def texts(count):
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(FIRST_TEXT, MEDIUM, (n + 5,), generator=drawn) for n in range(count)]


@pytest.mark.parametrize("name", every(3, FAMILIES))
def test_images_beside_texts(name):
    case = build(name)
    prompts = [case.prompt(seed=seed) for seed in (0, 1)]
    with kvkeep.attach(case.model):

        def alone(**prompt):
            found = case.model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
            return found[0, prompt["input_ids"].shape[1] :].tolist()

        expected = [alone(**prompt) for prompt in prompts]
        batch = Batch(case.model, chunk=4)
        made = []
        for prompt in prompts:
            reuse, ids = WithMedia(case.model, media_of(prompt)), prompt["input_ids"][0]
            made.append(batch.add(ids, SamplingParams(NEW, logprobs=True), n=2, reuse=reuse))
        others = {text: batch.add(text, SamplingParams(NEW))[0] for text in texts(3)}
        batch.step()
        (urgent,) = batch.add(texts(1)[0], SamplingParams(NEW, priority=1))
        batch.sequences = 4
        list(batch)
        for answers, tokens in zip(made, expected, strict=True):
            assert [answer.tokens for answer in answers] == [tokens, tokens]
        (first, _), (second, _) = made
        assert first.logprobs != second.logprobs  # only the images differ
        for text, answer in others.items():
            assert answer.tokens == alone(input_ids=text[None])
        assert urgent.tokens


def test_a_preempted_prompt_with_an_image_goes_on():
    case = build("qwen2_vl")
    prompt = case.prompt()
    with kvkeep.attach(case.model):
        runs = []
        for priority in (0, 1):
            batch = Batch(case.model, sequences=1)
            reuse = WithMedia(case.model, media_of(prompt))
            (answer,) = batch.add(prompt["input_ids"][0], SamplingParams(NEW), reuse=reuse)
            batch.step()
            batch.add(texts(1)[0], SamplingParams(NEW, priority=priority))
            batch.step()
            assert (answer.cache is None) == bool(priority)
            list(batch)
            assert answer.error is None
            runs.append(answer.tokens)
        assert runs[0] == runs[1]


def test_a_model_of_texts_refuses_images():
    model = tiny("llama")
    with kvkeep.attach(model):
        reuse = WithMedia(model, {"pixel_values": torch.zeros(1, 3, 4, 4)})
        batch = Batch(model)
        (answer,) = batch.add([5, 6], SamplingParams(NEW), reuse=reuse)
        list(batch)
        assert isinstance(answer.error, UnsupportedError)
        assert "text only" in str(answer.error)
