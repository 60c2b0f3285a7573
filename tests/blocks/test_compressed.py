"""Prompts with blocks that policy kvzip compresses, each by itself."""

from __future__ import annotations

import pytest
import torch
from support.block_texts import model_of, text
from support.joined_logits import expected_apart

import kvkeep
from kvkeep.blocks import Block, Prompt, prefill
from kvkeep.errors import UnsupportedError
from kvkeep.host import host_of
from kvkeep.host.cache import bytes_of
from kvkeep.host.compress import read
from kvkeep.store import PrefixStore, open_store


def question(*seeds, asked="Well?"):
    parts = [part for seed in seeds for part in (f"\n{seed}:\n", Block(text(seed)))]
    return Prompt([*parts, f"\n{asked}"])


def spans_of(encoded):
    return [block.span for block in encoded.blocks]


@torch.no_grad()
def last(model, encoded, cache):
    return model(encoded.input_ids[:, -1:], past_key_values=cache).logits[0]


def kept(cache):
    """Positions by layer and head."""
    return [
        [sorted(p for p in head.tolist() if p >= 0) for head in layer.positions()[0]]
        for layer in cache.layers
    ]


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "smollm3"])
def test_a_share_of_everything_is_the_uncompressed_result(tokenizer, family):
    """Blocks see themselves, the rest sees everything before it."""
    model = model_of(family, **({"no_rope_layers": [1, 0, 1]} if family == "smollm3" else {}))
    encoded = question(1, 2, 3).encode(tokenizer)
    wanted = expected_apart(model, encoded.input_ids, spans_of(encoded), 1)
    kvkeep.attach(model)
    cache, report = encoded.prefill(model, spec="kvzip:100%")
    assert cache.fed == report.tokens == encoded.input_ids.shape[1] - 1
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)
    lengths = sum(stop - start for start, stop in spans_of(encoded))
    assert (report.compressed, report.approximate, report.repaired) == (lengths, lengths, 0)
    assert report.deviation is None


@pytest.mark.parametrize("spec", ["kvzip:30%", "kvzip:30%+int8"])
def test_each_block_keeps_what_it_keeps_alone(tokenizer, spec):
    model = model_of()
    encoded = question(1, 2).encode(tokenizer)
    kvkeep.attach(model)
    cache, _ = encoded.prefill(model, spec=spec)
    spans, ids = spans_of(encoded), encoded.input_ids[0, :-1]
    inside = {p for start, stop in spans for p in range(start, stop)}
    expected = [[[p for p in range(len(ids)) if p not in inside] for _ in "ab"] for _ in "abc"]
    for start, stop in spans:
        alone = kvkeep.Cache(model, spec)
        read(host_of(model), alone, ids[None, start:stop])
        for layer, heads in zip(expected, kept(alone), strict=True):
            for head, own in zip(layer, heads, strict=True):
                head += [start + p for p in own]
    assert kept(cache) == [[sorted(head) for head in layer] for layer in expected]
    assert cache.live_bytes < 0.6 * bytes_of(
        kvkeep.Cache(model, spec), host_of(model).geometries(), len(ids)
    )


def test_blocks_are_found_in_any_order_and_another_store(tokenizer, tmp_path, monkeypatch):
    model = model_of()
    kvkeep.attach(model)
    encoded = question(3, 1, 2).encode(tokenizer)
    wanted = last(model, encoded, encoded.prefill(model, spec="kvzip:30%").cache)
    store = PrefixStore(backend=open_store(str(tmp_path)))
    first = question(1, 2, 3).encode(tokenizer).prefill(model, store=store, spec="kvzip:30%").report
    assert first.found == 0
    monkeypatch.setattr("kvkeep.store.prefix.compress", None)  # nothing is compressed again
    for used in (store, PrefixStore(backend=open_store(str(tmp_path)))):
        cache, report = encoded.prefill(model, store=used, spec="kvzip:30%")
        assert report.found == report.compressed > 0
        assert last(model, encoded, cache).equal(wanted)
        used.check()


def test_exact_and_compressed_blocks_stay_apart(tokenizer):
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model)
    encoded = question(1, 2).encode(tokenizer)
    exact = encoded.prefill(model, store=store, recompute=0)
    assert encoded.prefill(model, store=store, spec="kvzip:30%").report.cached == 0
    again = encoded.prefill(model, store=store, recompute=0)
    assert again.report.compressed == 0
    assert last(model, encoded, again.cache).equal(last(model, encoded, exact.cache))


def test_without_a_block_all_is_one_text(tokenizer):
    model = model_of()
    kvkeep.attach(model)
    encoded = Prompt([text(1), "\nWell?"]).encode(tokenizer)
    cache, report = encoded.prefill(model, spec="kvzip:30%")
    alone = kvkeep.Cache(model, "kvzip:30%")
    read(host_of(model), alone, encoded.input_ids[:, :-1])
    assert kept(cache) == kept(alone)
    assert report.compressed == report.tokens
    whole = encoded.prefill(model, spec="kvzip:30%", recompute="all").report
    assert whole.compressed == whole.tokens


def test_a_budget_counts_what_is_kept(tokenizer):
    model = model_of()
    kvkeep.attach(model)
    encoded = question(1).encode(tokenizer)
    start, stop = spans_of(encoded)[0]
    whole = bytes_of(kvkeep.Cache(model), host_of(model).geometries(), stop - start)
    store = PrefixStore(budget=whole // 2)
    report = encoded.prefill(model, store=store, spec="kvzip:30%").report
    assert report.blocks[0].refused == ""
    assert 0 < store.nbytes <= whole // 2
    assert "bytes" in encoded.prefill(model, store=store).report.blocks[0].refused


def test_generate_with_blocks(tokenizer):
    model, store = model_of(), PrefixStore()
    encoded = question(1, 2).encode(tokenizer)
    kvkeep.attach(model, "kvzip:30%", store=store)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    first = model.generate(encoded, **greedy)
    assert store.stats().compressed_entries == 2
    cache, report = encoded.prefill(model, spec="kvzip:30%", store=store)
    assert report.found == report.compressed > 0
    assert model.generate(encoded.input_ids, past_key_values=cache, **greedy).equal(first)


def test_token_ids_are_refused_at_once():
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model)
    with pytest.raises(UnsupportedError, match="kvzip"):
        prefill(model, [torch.arange(9), torch.arange(9)], spec="kvzip:40%", store=store)
    assert store.stats().tokens == 0
