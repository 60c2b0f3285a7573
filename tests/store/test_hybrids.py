"""Prefixes of models with recurrent layers: a hit begins where their states were stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep import Cache, PrefixStore, attach, detach
from kvkeep.errors import CapacityError
from kvkeep.generate import Batch, Reuse, SamplingParams
from kvkeep.store.disk import Disk
from kvkeep.store.layer_slices import Stretch
from tests.support.sweep_models import model_of

_FAMILIES = [
    "lfm2",
    "granitemoehybrid",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("jamba", "nemotron_h", "falcon_h1", "qwen3_next", "zamba2", "zaya", "bamba")
    ),
]


@pytest.fixture(scope="module", params=_FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = model_of(request.param)
    with attach(found):
        yield found


def _ids(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 96, (tokens,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _next(model: Any, cache: Any, ids: Tensor) -> Tensor:
    position = torch.arange(cache.fed, cache.fed + len(ids))[None]
    logits: Tensor = model(ids[None], past_key_values=cache, position_ids=position).logits
    return logits


def _answer(model: Any, prompt: Tensor) -> Tensor:
    ids = prompt[None]
    mask = torch.ones_like(ids)  # otherwise one is made where an answer holds the padding token
    text: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return text


def test_a_hit_is_bit_for_bit_what_was_read(model: Any) -> None:
    store, text, rest = PrefixStore(block=8), _ids(30), _ids(5, 1)
    read = store.read(model, text)
    assert read.found == 0
    again = store.read(model, text)
    assert again.found == 30
    assert _next(model, again.cache, rest).equal(_next(model, read.cache, rest))
    assert not again.cache.carried.marks
    store.check()


def test_a_hit_begins_at_the_last_stored_state(model: Any) -> None:
    store, text = PrefixStore(block=8), _ids(30)
    store.read(model, text)
    other = torch.cat([text[:21], _ids(9, 1)])
    read = store.read(model, other)
    assert read.found == 16
    fresh = PrefixStore(block=8).read(model, other)
    assert _next(model, read.cache, _ids(3, 2)).equal(_next(model, fresh.cache, _ids(3, 2)))
    assert store.read(model, torch.cat([text[:7], _ids(9, 3)])).found == 0
    store.check()


def test_blocks_of_another_process(model: Any, tmp_path: Path) -> None:
    text, rest = _ids(30), _ids(5, 1)
    disk = Disk(tmp_path)
    expected = PrefixStore(backend=disk, block=8).read(model, text).cache
    found = PrefixStore(backend=disk, block=8).read(model, text)
    assert found.found == 30
    assert _next(model, found.cache, rest).equal(_next(model, expected, rest))
    shorter = PrefixStore(backend=disk, block=8).read(model, text[:27])
    assert shorter.found == 24


def test_states_count_against_the_budget(model: Any) -> None:
    text = _ids(30)
    whole = PrefixStore(block=8)
    whole.read(model, text)
    states = Cache(model).bytes_for(0)
    assert whole.nbytes > 4 * states
    for budget in (whole.nbytes - 1, states, 1):
        store = PrefixStore(budget, block=8)
        store.read(model, text)
        store.check()
        assert store.nbytes <= budget
        assert store.read(model, text).found < 30


def test_generate_and_a_second_turn(model: Any) -> None:
    store, prompt = PrefixStore(block=8), _ids(20)
    plain = _answer(model, prompt)
    with _attached_with(model, store):
        first = _answer(model, prompt)
        assert first.equal(plain)
        asked = store.stats().hit_tokens
        second = torch.cat([first[0], _ids(4, 1)])
        answer = _answer(model, second)
        assert store.stats().hit_tokens == asked + 25  # all that was fed in the first turn
    assert answer.equal(_answer(model, second))


def test_prompts_of_a_batch_begin_with_what_others_read(model: Any) -> None:
    store, text = PrefixStore(), _ids(16)
    prompts = [torch.cat([text, _ids(5, seed)]) for seed in range(3)]
    batch = Batch(model, store=store, chunk=8)
    answers = []
    for prompt in prompts:
        answers += batch.add(prompt, SamplingParams(4))
        while batch.running or batch.waiting:
            batch.step()
    assert [answer.cached for answer in answers] == [0, 16, 16]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(prompt[None], max_new_tokens=4, do_sample=False)
        assert answer.tokens == expected[0, len(prompt) :].tolist()


@contextmanager
def _attached_with(model: Any, store: PrefixStore) -> Iterator[None]:
    """Replace the attachment of the fixture by one with a store."""
    detach(model)
    try:
        with attach(model, store=store):
            yield
    finally:
        attach(model)


@pytest.mark.parametrize("spec", ["snapkv:16,window=4", "keep_all@host"])
def test_a_budget_begins_with_states_too(model: Any, spec: str) -> None:
    store, text, rest = PrefixStore(block=8), _ids(40), _ids(5, 1)
    first = store.read(model, text, spec=spec)
    again = store.read(model, text, spec=spec)
    assert again.found >= 32
    logits = [_next(model, read.cache, rest) for read in (first, again)]
    assert logits[0].equal(logits[1])


def test_rows_that_begin_alike(model: Any) -> None:
    """Unless they are padded: padding behind tokens would change the states."""
    shared = _ids(24)
    rows = torch.stack([torch.cat([shared, _ids(6, seed)]) for seed in (1, 2)])
    mask = torch.ones_like(rows)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    padded = mask.clone()
    padded[1, :6] = 0
    moved = rows.clone()
    moved[1] = torch.cat([torch.zeros(6, dtype=torch.int64), shared])
    wanted = [
        model.generate(x, attention_mask=m, **options) for x, m in ((rows, mask), (moved, padded))
    ]
    detach(model)
    store = PrefixStore(block=8)
    with attach(model, store=store):
        for _ in range(2):
            assert model.generate(rows, attention_mask=mask, **options).equal(wanted[0])
            assert model.generate(moved, attention_mask=padded, **options).equal(wanted[1])
    assert store.stats().hits > 0
    attach(model)


def test_tokens_that_are_stored_get_the_states_of_shorter_texts(model: Any) -> None:
    store, text = PrefixStore(), _ids(30)
    store.read(model, text)
    assert [store.read(model, text[:20]).found for _ in range(2)] == [0, 20]
    expected = store.read(model, torch.cat([text[:20], _ids(5, 1)]))
    assert expected.found == 20
    rows = [torch.cat([text[:25], _ids(4, seed)]) for seed in (1, 2)]
    asked = store.stats().hit_tokens
    for found in (20, 45):
        store.prefill_rows(model, rows)
        assert store.stats().hit_tokens == asked + found
    store.check()


def test_states_of_shorter_texts_count_against_the_budget(model: Any) -> None:
    whole, text = PrefixStore(), _ids(30)
    whole.read(model, text)
    rows = [torch.cat([text, _ids(3, seed)]) for seed in (1, 2)]
    assert PrefixStore(whole.nbytes - 1).prefill_rows(model, rows) is None
    assert PrefixStore(whole.nbytes).prefill_rows(model, rows) is not None
    store = PrefixStore(whole.nbytes + Cache(model).bytes_for(0))  # room for one more mark
    store.read(model, text)
    found = []
    for length in (10, 10, 20, 20):
        found.append(store.read(model, text[:length]).found)
        store.check()
    assert found == [0, 10, 10, 10]
    assert store.read(model, text).found == 20  # for whose state the end of the text was evicted


def test_a_block_without_a_state_is_replaced(model: Any, tmp_path: Path) -> None:
    text, disk = _ids(16), Disk(tmp_path)
    store = PrefixStore(backend=disk, block=8)
    store.read(model, text)
    whole, disk = disk, Disk(tmp_path / "other")
    for key in whole.scan():
        block = whole.get(key)
        assert block is not None
        assert isinstance(block.content, Stretch)
        disk.put(replace(block, content=Stretch(block.content.layers, len(block.content))))
    found = [PrefixStore(backend=disk, block=8).read(model, text).found for _ in range(2)]
    assert found == [0, 16]


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_promises_the_states_that_it_copies(model: Any, n: int) -> None:
    reuse, prompt, params = Reuse(model, PrefixStore()), _ids(40), SamplingParams(20)
    free = Batch(model, chunk=8)
    free.add(prompt, params, n=n, reuse=reuse)
    free.step()
    batch = Batch(model, chunk=8, max_bytes=free.promised_bytes)
    answers = batch.add(prompt, params, n=n, reuse=reuse)
    copied = 0
    while batch.running or batch.waiting:
        batch.step()
        caches = [answer.cache for answer in answers if answer.cache is not None]
        marked = [cache.carried.marked_bytes for cache in caches if cache.carried]
        copied = max(copied, *marked, 0)
        twice = sum(cache.shared_bytes for cache in caches[1:])
        assert batch.live_bytes - twice + sum(marked) <= free.promised_bytes
        assert not (sum(marked) and answers[0].tokens)
    assert copied > 0
    assert {answer.reason for answer in answers} == {"length"}
    (again,) = batch.add(torch.cat([prompt[:36], _ids(4, 1)]), params, reuse=reuse)
    list(batch)
    assert again.cached == 32
    alone = Batch(model, chunk=8)
    alone.add(prompt, params, reuse=reuse)
    alone.step()
    less = Batch(model, chunk=8, max_bytes=alone.promised_bytes - 1)
    with pytest.raises(CapacityError, match="raise max_bytes"):
        less.add(prompt, params, reuse=reuse)
