"""A prompt that a used cache holds already, or does not begin with what the cache was fed."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import StateError

PROMPT, NEW = 14, 5
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def attached(request):
    model = tiny(request.param)
    with kvkeep.attach(model):
        yield model


def ids(rows: int = 1, n: int = PROMPT) -> torch.Tensor:
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(3))


MODES = {
    "greedy": {},
    "chunked": {"prefill_chunk_size": 4},
    "sampling": {"do_sample": True},
    "answers": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_the_cache_holds_already(attached, mode):
    rows = 1 if mode == "drafts" else 2
    options = OPTIONS | MODES[mode]
    cache = kvkeep.Cache(attached)
    with torch.inference_mode():
        attached(ids(rows, 6), past_key_values=cache)
    torch.manual_seed(5)
    expected = attached.generate(ids(rows, 6), **options)
    torch.manual_seed(5)
    assert attached.generate(ids(rows, 6), past_key_values=cache, **options).equal(expected)


def test_a_padded_batch_that_the_cache_holds_already(attached):
    text, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :1] = 0
    cache, given = kvkeep.Cache(attached), {"attention_mask": mask}
    expected = attached.generate(text, **given, **OPTIONS)
    given["past_key_values"] = cache
    attached.generate(text, max_new_tokens=1, **given)
    assert cache.fed == text.shape[1]
    assert attached.generate(text, **given, **OPTIONS).equal(expected)


def test_embeddings_that_the_cache_holds_already(attached):
    embedded = attached.get_input_embeddings()(ids(1, 6)).detach()
    expected = attached.generate(inputs_embeds=embedded, **OPTIONS)
    cache = kvkeep.Cache(attached)
    with torch.inference_mode():
        attached(inputs_embeds=embedded, past_key_values=cache)
    assert attached.generate(inputs_embeds=embedded, past_key_values=cache, **OPTIONS).equal(
        expected
    )


def test_the_same_prompt_with_its_used_cache(attached):
    cache = kvkeep.Cache(attached)
    attached.generate(ids(), past_key_values=cache, **OPTIONS)
    fed = cache.fed
    for options in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(StateError, match=r"the cache already holds 18; .*reset\(\)"):
            attached.generate(ids(), past_key_values=cache, **OPTIONS, **options)
    assert cache.fed == fed


def test_the_last_token_of_an_evicting_cache_stays(attached):
    cache = kvkeep.Cache(attached, "h2o:8")
    with torch.inference_mode():
        attached(ids(), past_key_values=cache)
    with pytest.raises(StateError, match=r"the cache already holds 14 .*cannot remove"):
        attached.generate(ids(), past_key_values=cache, **OPTIONS)
    assert cache.fed == PROMPT


def other(text: torch.Tensor, at: int) -> torch.Tensor:
    changed = text.clone()
    changed[-1, at] = (changed[-1, at] + 1) % 90 + 2
    return changed


def read(model, cache):
    with torch.inference_mode():
        model(ids(2), past_key_values=cache)
    return cache, ids(2)


def read_in_chunks(model, cache):
    with torch.inference_mode():
        for part in ids(2).split(5, dim=1):
            model(part, past_key_values=cache)
    return cache, ids(2)


def said(model, cache):
    return cache, model.generate(ids(2), past_key_values=cache, **OPTIONS)


def went_on(model, cache):
    text = said(model, cache)[1]
    new = torch.tensor([[7, 8, 9]] * 2)
    mask = torch.ones(2, cache.fed + 4)
    last = torch.cat([text[:, -1:], new], dim=1)
    out = model.generate(last, attention_mask=mask, past_key_values=cache, **OPTIONS)
    return cache, torch.cat([text[:, :-1], out], dim=1)


def beams(model, cache):
    options = OPTIONS | {"num_beams": 2, "max_new_tokens": 1}
    model.generate(ids(2), past_key_values=cache, **options)
    cache.select([0, 2])
    return cache, ids(2)


def forked(model, cache):
    text = said(model, cache)[1]
    return cache.freeze().fork(), text


def copied(model, cache):
    text = said(model, cache)[1]
    return copy.deepcopy(cache), text


def restored(model, cache):
    text, before = said(model, cache)[1], cache.snapshot()
    cache.reset()
    cache.restore(before)
    return cache, text


def swapped(model, cache):
    text = said(model, cache)[1]
    cache.reorder([1, 0])
    return cache, text.flip(0)


WAYS = (read, read_in_chunks, said, went_on, beams, forked, copied, restored, swapped)


@pytest.mark.parametrize("way", WAYS)
def test_a_text_that_begins_otherwise(attached, way):
    cache, text = way(attached, kvkeep.Cache(attached))
    fed, more = cache.fed, torch.cat([text, torch.tensor([[5, 6]] * 2)], dim=1)
    wrong = other(more, 11)
    words = rf"token 11 .*row 1 is {wrong[1, 11]}.* fed {more[1, 11]}"
    with pytest.raises(StateError, match=words):
        attached.generate(wrong, past_key_values=cache, **OPTIONS)
    assert cache.fed == fed
    expected = attached.generate(more, **OPTIONS)
    assert attached.generate(more, past_key_values=cache, **OPTIONS).equal(expected)


def test_what_was_cropped_does_not_count(attached):
    cache, text = said(attached, kvkeep.Cache(attached, "keep_all"))
    if any(layer.window for layer in cache.layers):
        pytest.skip("a window that was passed cannot be cropped")
    cache.crop(-10)
    wrong = other(text, 12)
    expected = attached.generate(wrong, **OPTIONS)
    assert attached.generate(wrong, past_key_values=cache, **OPTIONS).equal(expected)
    with pytest.raises(StateError, match="token 2 "):
        attached.generate(other(expected, 2), past_key_values=cache, **OPTIONS)


def test_padding_does_not_count(attached):
    mask = torch.ones_like(ids(2))
    mask[1, :5] = 0
    cache = kvkeep.Cache(attached)
    text = attached.generate(ids(2), attention_mask=mask, past_key_values=cache, **OPTIONS)
    text, mask = other(text, 3), torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
    expected = attached.generate(text, attention_mask=mask, **OPTIONS)
    given = {"attention_mask": mask, "past_key_values": cache}
    assert attached.generate(text, **given, **OPTIONS).equal(expected)
    cache.rewind(cache.fed)
    with pytest.raises(StateError, match="token 6 "):
        attached.generate(
            other(torch.cat([expected, expected[:, :2]], dim=1), 6),
            attention_mask=torch.cat([mask, torch.ones(2, NEW + 2, dtype=torch.long)], dim=1),
            past_key_values=cache,
            **OPTIONS,
        )


def test_what_a_store_read_and_a_file_holds_is_known(attached, tmp_path):
    store = kvkeep.PrefixStore()
    store.read(attached, ids(1, 9)[0])
    cache = store.read(attached, ids()[0]).cache
    cache.save(tmp_path / "a.kv", tokens=ids(), model=attached)
    given: list = []
    loaded = kvkeep.load(tmp_path / "a.kv", attached, tokens=given.append)
    for held in (cache, loaded):
        assert held.tokens.equal(ids())
        with pytest.raises(StateError, match="token 4 "):
            attached.generate(other(ids(1, 20), 4), past_key_values=held, **OPTIONS)


def test_what_is_not_known_is_not_compared(attached):
    cache = kvkeep.Cache(attached)
    with torch.inference_mode():
        attached(inputs_embeds=torch.randn(1, 6, 32), past_key_values=cache)
        attached(ids(1, 6), past_key_values=cache)
    assert cache.tokens is None
    attached.generate(ids(), past_key_values=cache, **OPTIONS)
    assert cache.tokens is None or cache.tokens.shape[1] <= cache.fed
