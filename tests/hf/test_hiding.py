"""Batches whose rows end at different steps go on as with transformers' own cache: a later mask
hides the padding that ended rows were fed."""

from __future__ import annotations

import pytest
import torch
from support.random_ids import ids
from support.slow import slow_unless
from support.tiny_models import tiny
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import ShapeError, UnsupportedError

PAD, ENDS = 0, list(range(6, 20))
OPTIONS = {
    "max_new_tokens": 9,
    "do_sample": True,
    "top_k": 2,
    "eos_token_id": ENDS,
    "pad_token_id": PAD,
}


def conversation(model, cache, between=lambda cache: cache, turns=3):
    """What is said in each turn, and how many tokens each row says."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(9)
    text = torch.randint(6, 96, (3, 7), generator=generator)
    mask = torch.ones_like(text)
    mask[0, :4] = mask[2, :1] = 0
    said, counts = [], []
    for _ in range(turns):
        given = {"attention_mask": mask, "past_key_values": cache}
        longer = model.generate(text, **given, **OPTIONS)
        new = torch.randint(6, 96, (3, 4), generator=generator)
        shown = torch.ones_like(new)
        shown[1, :2] = 0  # prompts of different lengths
        answer = (longer[:, text.shape[1] :] != PAD).long()
        said.append(longer)
        counts.append(answer.sum(dim=1).tolist())
        text, mask = torch.cat([longer, new], dim=1), torch.cat([mask, answer, shown], dim=1)
        cache = between(cache)
    return said, counts


def saved(model, path):
    def through_a_file(cache):
        cache.save(path / "a.kv", model=model)
        return kvkeep.load(path / "a.kv", model)

    return through_a_file


def restored(cache):
    before = cache.snapshot()
    cache.reset()
    cache.restore(before)
    return cache


FAMILIES = ("llama", "mistral", "gemma3", "llama4", "deepseek-v3")
SPECS = ("keep_all", "keep_all@fixed:96", "keep_all@concat", "window:64,sinks=4")


@pytest.mark.parametrize("family", slow_unless({"gemma3", "deepseek-v3"}.__contains__, FAMILIES))
def test_rows_that_ended_at_different_steps(family, tmp_path):
    model = tiny(family)
    expected, counts = conversation(model, DynamicCache(config=model.config))
    assert all(len(set(count)) > 1 for count in counts[:2])
    with kvkeep.attach(model):
        for spec in SPECS:
            said, _ = conversation(model, kvkeep.Cache(model, spec))
            assert all(map(torch.equal, said, expected)), spec
        for between in (lambda x: x.freeze().fork(), restored, saved(model, tmp_path)):
            said, _ = conversation(model, kvkeep.Cache(model), between)
            assert all(map(torch.equal, said, expected))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "llama4"])
def test_padding_between_tokens(family):
    """Windows of transformers count its columns."""
    model, start = tiny(family), torch.Generator().manual_seed(0)
    text = torch.randint(2, 96, (3, 24), generator=start)
    mask = torch.ones_like(text)
    mask[0, :3] = mask[1, :1] = mask[1, 10:14] = mask[2, 10:12] = mask[2, 21] = 0
    place = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)

    def logits(cache):
        found = []
        for part in (slice(0, 10), slice(10, 19), *(slice(i, i + 1) for i in range(19, 24))):
            given = {"attention_mask": mask[:, : part.stop], "position_ids": place[:, part]}
            found.append(model(text[:, part], past_key_values=cache, **given).logits)
        return torch.cat(found, dim=1)[mask > 0]

    expected = logits(DynamicCache(config=model.config))
    with kvkeep.attach(model):
        for spec in ("keep_all", "keep_all@concat"):
            cache = kvkeep.Cache(model, spec)
            torch.testing.assert_close(logits(cache), expected, atol=5e-5, rtol=5e-4)
            assert cache.seen.tolist() == mask.sum(dim=1).tolist()


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama")
    with kvkeep.attach(model):
        yield model


def read(model, spec):
    cache = kvkeep.Cache(model, spec)
    with torch.no_grad():
        model(ids(2, 9), past_key_values=cache)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:9] = 0
    return cache, mask


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("h2o:6", "hides 3 .*policy h2o has already used them .*keep_all or a window"),
        ("snapkv:6,window=2", "policy snapkv"),
        ("keep_all+kivi", "codec kivi .* has encoded"),
        (["keep_all", "h2o:6"], "policy h2o"),
    ],
)
def test_what_cannot_be_hidden_is_refused_before_anything_changes(llama, spec, reason):
    cache, mask = read(llama, spec)
    before = [layer.positions().clone() for layer in cache.layers]
    with pytest.raises(UnsupportedError, match=reason):
        llama(ids(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.seen.tolist() == [9, 9]
    assert all(layer.positions().equal(x) for layer, x in zip(cache.layers, before, strict=True))
    llama(ids(2, 1), past_key_values=cache)


@torch.no_grad()
def test_what_was_hidden_stays_hidden(llama):
    cache, mask = read(llama, "keep_all")
    llama(ids(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.seen.tolist() == [10, 7]
    again = torch.cat([torch.ones_like(mask), torch.ones(2, 1, dtype=torch.long)], dim=1)
    with pytest.raises(ShapeError, match=r"shows \[10, 10\] tokens.*\[10, 7\]"):
        llama(ids(2, 1), attention_mask=again, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("columns", [9, 7, 4])
def test_a_crop_behind_what_was_hidden(llama, columns):
    cache, mask = read(llama, "keep_all")
    shared = cache.freeze()
    llama(ids(2, 1), attention_mask=mask, past_key_values=cache)
    cache.rewind(columns)
    left = mask[:, :columns]
    assert cache.seen.tolist() == left.sum(dim=1).tolist()
    assert shared.fork().seen.tolist() == [9, 9]
    mask = torch.cat([left, torch.ones(2, 3, dtype=torch.long)], dim=1)
    place = (mask.cumsum(dim=1) - 1)[:, columns:]
    found = llama(ids(2, 3), attention_mask=mask, position_ids=place, past_key_values=cache).logits
    plain = DynamicCache(config=llama.config)
    llama(ids(2, 9)[:, :columns], past_key_values=plain)
    expected = llama(
        ids(2, 3), attention_mask=mask, position_ids=place, past_key_values=plain
    ).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_rows_are_taken_with_what_is_hidden(llama):
    cache, mask = read(llama, "keep_all")
    llama(ids(2, 1), attention_mask=mask, past_key_values=cache)
    cache.reorder([1, 0])
    assert cache.seen.tolist() == [7, 10]
    more = torch.cat([mask.flip(0), torch.ones(2, 1, dtype=torch.long)], dim=1)
    llama(ids(2, 1), attention_mask=more, past_key_values=cache)
    cache.select([0])
    assert cache.seen.tolist() == [8]
