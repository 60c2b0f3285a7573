"""Prompts with blocks: where their keys and values come from, and what they give."""

from __future__ import annotations

import pytest
import torch
from support.block_texts import model_of, text
from support.joined_logits import expected_apart

import kvkeep
from kvkeep.blocks import Block, Chat, Encoded, Prompt, prefill
from kvkeep.errors import ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.host import host_of
from kvkeep.store import Disk, ModelGeometry, PrefixStore
from kvkeep.store.identity import keyed


def question(*order, blocks=Block):
    """Documents, each with a line before it, and a question."""
    parts = ["Use these.\n\n"]
    for number in order:
        parts += [f"Document {number}:\n", blocks(text(number)), "\n\n"]
    return Prompt([*parts, "What of the bell?"])


def spans_of(encoded):
    return [segment.span for segment in encoded.blocks if not segment.refused]


def last(model, encoded, cache):
    with torch.inference_mode():
        return model(encoded.input_ids[:, cache.fed :], past_key_values=cache).logits[0]


@pytest.mark.parametrize("family", ["llama", "phi", "glm4", "smollm3", "gpt-neox", "cohere"])
def test_nothing_computed_again(tokenizer, family):
    """Blocks see themselves, the rest sees everything before it."""
    model = model_of(family, **({"no_rope_layers": [1, 0, 1]} if family == "smollm3" else {}))
    encoded = question(1, 2, 3).encode(tokenizer)
    assert len(spans_of(encoded)) == 3
    wanted = expected_apart(model, encoded.input_ids, spans_of(encoded), 1)
    kvkeep.attach(model)
    cache, report = encoded.prefill(model, recompute=0)
    assert cache.fed == encoded.input_ids.shape[1] - 1 == report.tokens
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)
    assert report.repaired == 0
    assert report.approximate == sum(stop - start for start, stop in spans_of(encoded))
    assert 0 < report.deviation < 2
    assert report is encoded.report


@pytest.mark.parametrize("recompute", ["all", "boundary:1000", 0.99999])
def test_everything_computed_again(tokenizer, recompute):
    model = model_of()
    encoded = question(1, 2, 3).encode(tokenizer)
    with torch.no_grad():
        wanted = model(encoded.input_ids).logits[0, -1:]
    kvkeep.attach(model)
    cache, report = encoded.prefill(model, recompute=recompute)
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)
    assert (report.approximate, report.deviation) == (0, 0.0)


def test_the_rest_is_exact_where_a_block_begins_the_prompt(tokenizer):
    model = model_of()
    encoded = Prompt([Block(text(1)), "\nWell?"]).encode(tokenizer)
    with torch.no_grad():
        wanted = model(encoded.input_ids).logits[0, -1:]
    kvkeep.attach(model)
    cache, report = encoded.prefill(model, recompute=0)
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)
    assert (report.approximate, report.deviation) == (0, 0.0)
    assert report.blocks[0].refused == ""


def test_a_block_that_ends_the_prompt(tokenizer):
    model = model_of()
    encoded = Prompt(["Look:\n", Block(text(1)), "\n", Block(text(2))]).encode(tokenizer)
    wanted = expected_apart(model, encoded.input_ids, spans_of(encoded), 1)
    kvkeep.attach(model)
    cache, _ = encoded.prefill(model, recompute=0)
    assert cache.fed == encoded.input_ids.shape[1] - 1
    # The last token is fed by whoever goes on, and sees everything.
    seen = [*spans_of(encoded)[:1], (spans_of(encoded)[1].start, cache.fed)]
    wanted = expected_apart(model, encoded.input_ids, seen, 1)
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)


def test_blocks_are_found_again_in_any_order(tokenizer):
    model, store = model_of(), PrefixStore()
    kvkeep.attach(model)
    first = question(1, 2, 3).encode(tokenizer).prefill(model, store=store, recompute=0).report
    assert (first.exact, first.found) == (0, 0)
    encoded = question(3, 1, 2).encode(tokenizer)
    second = encoded.prefill(model, store=store, recompute=0).report
    lengths = [stop - start for start, stop in spans_of(encoded)]
    assert second.found == sum(lengths)
    assert second.exact == spans_of(encoded)[0].start - len(tokenizer("3:\n").input_ids)
    assert second.cached == second.exact + second.found
    third = question(3, 1, 2).encode(tokenizer).prefill(model, store=store).report
    assert third.repaired == round(0.15 * sum(lengths))
    assert third.approximate == sum(lengths) - third.repaired
    elsewhere = encoded.prefill(model, store=store, namespace="b", recompute=0).report
    assert elsewhere.cached == 0


def test_what_reading_gave_is_used_where_it_is_known(tokenizer):
    """A block of a beginning that was read as a whole is not approximated."""
    model, store = model_of(), PrefixStore()
    plain, encoded = (question(1, 2, 3, blocks=b).encode(tokenizer) for b in (str, Block))
    with torch.no_grad():
        wanted = model(encoded.input_ids).logits[0, -1:]
    kvkeep.attach(model)
    begun = plain.input_ids[0, : spans_of(encoded)[1].start + 5]
    store.prefill(model, begun)
    cache, report = encoded.prefill(model, store=store, recompute=0)
    assert report.exact == spans_of(encoded)[1].start
    lengths = [stop - start for start, stop in spans_of(encoded)]
    assert report.approximate == sum(lengths[1:])
    store.prefill(model, plain.input_ids)
    cache, report = encoded.prefill(model, store=store, recompute=0)
    assert report.exact == report.tokens
    assert report.approximate == 0
    torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)


def test_joined_blocks_are_never_stored_as_what_reading_gives(tokenizer, tmp_path):
    model, store = model_of(), PrefixStore(backend=Disk(tmp_path / "store"))
    kvkeep.attach(model, store=store, recompute=0)
    encoded = question(1, 2).encode(tokenizer)
    start = spans_of(encoded)[0].start
    answer = model.generate(encoded, max_new_tokens=5, do_sample=False)
    assert encoded.report.approximate > 0
    text = keyed(host_of(model), answer[0], kvkeep.Cache(model).specs)
    fed = kvkeep.Cache(model)
    with torch.inference_mode():
        model(answer[:, :1], past_key_values=fed)
    for other in (store, PrefixStore(backend=store.backend)):
        assert other.known(*text, lambda: ModelGeometry.of_cache(fed)) == start
    cache, _ = encoded.prefill(model, store=store, recompute=0)
    tokens = encoded.input_ids[0, : cache.fed]
    cache.save(tmp_path / "joined.kv")
    for joined in (cache, kvkeep.load(tmp_path / "joined.kv", model), cache.freeze().fork()):
        assert store.learn(model, tokens, joined) == 0
        with pytest.raises(UnsupportedError, match="computed separately"):
            store.insert("m", tokens, joined)
    assert store.known(*text) == start


def test_generate(tokenizer):
    model, store = model_of(), PrefixStore()
    encoded = question(2, 1).encode(tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(encoded.input_ids, **options)
    with kvkeep.attach(model, store=store, recompute="all"):
        assert model.generate(encoded, **options).equal(wanted)
        assert model.generate(inputs=encoded, **options).equal(wanted)
        assert encoded.report.exact == encoded.report.tokens
        assert model.generate(encoded.input_ids, **options).equal(wanted)
        two = model.generate(encoded, num_beams=2, num_return_sequences=2, **options)
        assert two.shape[0] == 2
        with pytest.raises(StateError, match="leave out "):
            model.generate(encoded, past_key_values=kvkeep.Cache(model))
    with kvkeep.attach(model):  # without a store, blocks are computed for this prompt only
        found = model.generate(encoded, **options)
        assert found.shape == wanted.shape
        assert encoded.report.cached == 0


def test_refused_by_model_and_store(tokenizer):
    """Whatever the reason, the prompt is read as it is."""
    window = {"sliding_window": 8}
    cases = [
        (model_of("gpt2"), "keep_all", None, "no rotary embedding"),
        (
            model_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "keep_all",
            None,
            "depend on a text's length",
        ),
        (
            model_of("mistral", **window),
            "keep_all",
            None,
            "3 of 3 layers (layers 0-2) have a sliding window",
        ),
        (model_of(), "keep_all", 2000, "but the store holds 2000"),
    ]
    for model, spec, budget, reason in cases:
        encoded = question(1, 2).encode(tokenizer)
        with torch.no_grad():
            wanted = model(encoded.input_ids).logits[0, -1:]
        kvkeep.attach(model)
        cache, report = encoded.prefill(model, spec=spec, store=PrefixStore(budget))
        assert all(reason in block.refused for block in report.blocks)
        assert (report.approximate, report.repaired, report.found) == (0, 0, 0)
        torch.testing.assert_close(last(model, encoded, cache), wanted, atol=1e-4, rtol=1e-4)
    model = model_of()
    encoded = question(1).encode(tokenizer)
    _, report = encoded.prefill(model)
    assert "not attached" in report.blocks[0].refused
    kvkeep.attach(model)
    assert encoded.prefill(model).report.blocks[0].refused == ""


def test_bad_input(tokenizer):
    model = model_of()
    kvkeep.attach(model)
    with pytest.raises(ShapeError, match="a prompt of 0 tokens"):
        Prompt([""]).encode(tokenizer).prefill(model)
    with pytest.raises(ShapeError, match="takes 1 to 512"):
        question(*range(12)).encode(tokenizer).prefill(model)
    encoded = question(1).encode(tokenizer)
    for recompute in (-0.1, 1, "boundary:x", "some"):
        with pytest.raises(SpecError, match="recompute="):
            encoded.prefill(model, recompute=recompute)
    one = Encoded(encoded.input_ids[0, :1], [])
    assert one.prefill(model).cache.fed == 0
    assert encoded.report is None


def test_reports_are_plain(tokenizer):
    import json

    model = model_of()
    kvkeep.attach(model)
    messages = [{"role": "user", "content": [Block(text(1)), "\n", Block("short"), "\nWell?"]}]
    report = Chat(messages).encode(tokenizer).prefill(model).report
    found = json.loads(json.dumps(report.asdict()))
    assert found["blocks"][0]["refused"] == ""
    assert "too short" in found["blocks"][1]["refused"]
    assert found["blocks"][0]["text"] == text(1)[:40]
    assert found["tokens"] == report.tokens


def test_texts_are_prompts_without_anything_between(tokenizer):
    """`prefill` of texts is a prompt of blocks only, the first of which begins it."""
    model = model_of()
    kvkeep.attach(model)
    texts = [tokenizer(text(number), return_tensors="pt").input_ids[0] for number in (1, 2)]
    cache = prefill(model, texts)
    wanted = expected_apart(
        model,
        torch.cat([*texts, texts[0][:3]])[None],
        [(len(texts[0]), len(texts[0]) + len(texts[1]))],
        3,
    )
    with torch.inference_mode():
        found = model(texts[0][None, :3], past_key_values=cache).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
