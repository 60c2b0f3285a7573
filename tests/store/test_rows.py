"""A batch whose prompts begin alike: what they share is computed and held once."""

from __future__ import annotations

import pytest
import torch
from support.random_ids import row as ids
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.store import PrefixStore

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


SHARED = ids(40)
PROMPTS = [torch.cat([SHARED, ids(n, n)]) for n in (5, 30, 12)]


def padded(prompts, *, left=True):
    """The arguments of `generate` for a batch."""
    n = max(map(len, prompts))
    rows, masks = torch.zeros(len(prompts), n, dtype=torch.int64), []
    for row, prompt in zip(rows, prompts, strict=True):
        place = slice(n - len(prompt), n) if left else slice(0, len(prompt))
        row[place] = prompt
        masks.append(torch.zeros(n, dtype=torch.int64))
        masks[-1][place] = 1
    return {"input_ids": rows, "attention_mask": torch.stack(masks)}


def made(spec="keep_all", store=None, family="llama", **options):
    model = tiny(family, max_position_embeddings=256)
    kvkeep.attach(model, spec, store=store)
    return model, lambda prompts=PROMPTS: model.generate(**padded(prompts), **OPTIONS, **options)


@pytest.mark.parametrize(
    ("family", "spec", "options"),
    [
        ("llama", "keep_all", {}),
        ("llama", "keep_all", {"num_beams": 2, "num_return_sequences": 2}),
        ("gpt2", "keep_all", {}),
        ("gpt2", "keep_all+int8", {"num_beams": 3}),
        ("qwen3", "keep_all+kivi:4,together=8", {}),
        ("llama", "keep_all@host", {}),
        ("llama", "keep_all@fixed:128", {}),
        ("llama", "snapkv:24,window=4", {}),
        ("llama", "adakv(snapkv:24,window=4)", {"num_beams": 2}),
        ("llama", "keydiff:40,recent=2@host", {}),
    ],
)
def test_answers_are_those_without_a_store(family, spec, options):
    """Of prompts in one chunk, which none of these policies reads otherwise."""
    wanted = made(spec, None, family, **options)[1]()
    store = PrefixStore()
    _, run = made(spec, store, family, **options)
    for found in (0, 1):
        assert run().equal(wanted)
        assert store.stats().hits == found
    assert store.stats().hit_tokens >= 39
    store.check()


def test_rows_read_the_same_slots(monkeypatch):
    """All that is fed is the shared beginning, once, and each row's rest behind its padding."""
    store, fed = PrefixStore(), []
    model, run = made(store=store)
    begin = kvkeep.Cache.begin

    def watching(cache, n, *rest):
        fed.append((cache.rows, n, cache.shared_bytes))
        return begin(cache, n, *rest)

    monkeypatch.setattr(kvkeep.Cache, "begin", watching)
    run()
    (_, first, _), (rows, second, shared), *_ = fed
    assert (first, rows, second) == (40, 3, 30)
    assert shared == store.nbytes
    model.generate(PROMPTS[1][None], **OPTIONS)
    assert store.stats().hit_tokens == 40  # by a prompt alone, of what a batch stored


def test_chunks_of_a_prompt():
    """As many forwards as the rest needs; positions count each row's tokens."""
    wanted = made()[1]()
    model = tiny("llama", max_position_embeddings=256)
    kvkeep.attach(model, store=PrefixStore())
    assert model.generate(**padded(PROMPTS), **OPTIONS, prefill_chunk_size=7).equal(wanted)


def test_all_of_a_prompt_but_its_last_token():
    """Where one prompt is the beginning of another, and a single row has padding."""
    prompts = [SHARED, torch.cat([SHARED, ids(3, 9)])]
    store = PrefixStore()
    wanted, run = made()[1], made(store=store)[1]
    assert run(prompts).equal(wanted(prompts))
    assert store.stats().tokens == 39
    given = padded([SHARED, ids(60, 8)])
    one = {name: x[:1] for name, x in given.items()}
    expected = made()[0].generate(**one, **OPTIONS)
    assert made(store=store)[0].generate(**one, **OPTIONS).equal(expected)
    assert store.stats().hit_tokens == 39


def test_what_all_begin_with():
    prompts, store = [*PROMPTS, torch.cat([SHARED[:30], ids(25, 7)])], PrefixStore()
    assert made(store=store)[1](prompts).equal(made()[1](prompts))
    assert store.stats().tokens == 30


@pytest.mark.parametrize(
    "prompts",
    [
        [ids(40), ids(40, 4)],
        [torch.cat([ids(15), ids(9, 4)]), torch.cat([ids(15), ids(9, 5)])],
        [SHARED, SHARED[:10]],
    ],
    ids=["nothing in common", "too little", "a short prompt"],
)
def test_what_is_not_worth_a_forward(prompts):
    store = PrefixStore()
    assert made(store=store)[1](prompts).equal(made()[1](prompts))
    assert store.stats().asked_tokens == store.nbytes == 0


def test_calls_that_pass_the_store_by():
    store, odd = PrefixStore(), padded(PROMPTS, left=False)
    model, _ = made(store=store)
    plain, _ = made()
    model.generate(**odd, **OPTIONS)
    hole = padded(PROMPTS)
    hole["attention_mask"][1, 50] = 0
    assert model.generate(**hole, **OPTIONS).equal(plain.generate(**hole, **OPTIONS))
    given = padded(PROMPTS)
    place = (given["attention_mask"].cumsum(1) - 1).clamp(min=0) + 3
    model.generate(**given, position_ids=place, **OPTIONS)
    model.generate(**given, past_key_values=kvkeep.Cache(model), **OPTIONS)
    assert store.nbytes == 0


def test_what_the_store_cannot_hold():
    store = PrefixStore(budget=2000)
    assert made(store=store)[1]().equal(made()[1]())
    assert store.nbytes == 0


def test_in_a_loop_of_your_own():
    store = PrefixStore()
    model, _ = made()
    cache = store.prefill_rows(model, PROMPTS, spec="tova:24")
    assert (cache.rows, cache.fed) == (3, 40)
    assert store.prefill_rows(model, [ids(10), ids(10)]) is None
    with pytest.raises(ShapeError, match="at least one token"):
        store.prefill_rows(model, [SHARED, SHARED[:0]])
    with pytest.raises(UnsupportedError, match="by itself"):
        store.prefill_rows(model, PROMPTS, spec="kvzip:50%")
