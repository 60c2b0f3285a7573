"""Activated LoRA: the base model's slots before the invocation, the adapter's behind it."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import needs_peft_of_transformers
from support.demo_stand_in import stand_in
from support.joined_logits import expected_apart
from support.tiny_models import tiny

import kvkeep
from kvkeep.blocks.prompt import Encoded
from kvkeep.blocks.tokenize import BlockTokens, Span
from kvkeep.errors import UnsupportedError
from kvkeep.hf.loading.fingerprint import activation_in
from kvkeep.host import Activation, adapters, host_of
from kvkeep.host.adapters import NEVER, InvokedAdapter
from kvkeep.store import Disk, PrefixStore
from kvkeep.store.identity import feed, keyed

INVOCATION = [90, 91, 92]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def adapted(**options):
    """A tiny model with two activated adapters, "default" and "other", which change something."""
    model = tiny("llama", max_position_embeddings=256, num_hidden_layers=3).eval()
    model.set_attn_implementation("eager")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj"],
        alora_invocation_tokens=INVOCATION,
        init_lora_weights=False,
        **options,
    )
    tuned = get_peft_model(model, config)
    tuned.add_adapter("other", config)
    return tuned.eval()


def text(length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 80, (length,), generator=generator)


def prompt(*parts):
    """Token ids (1, n) of texts and invocations."""
    return torch.cat([torch.as_tensor(part) for part in parts])[None]


def test_a_forward_that_fails_leaves_no_adapter_in_charge(monkeypatch):
    model = adapted()
    cache = kvkeep.Cache(model)
    cache.activation = Activation(0, "0")

    def interrupted(**_):
        assert adapters._OFFSET.get() == 5
        raise KeyboardInterrupt

    monkeypatch.setattr(model.get_decoder(), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed(host_of(model), text(5), cache)
    assert adapters._OFFSET.get() is None


@needs_peft_of_transformers()
@pytest.mark.parametrize("stored", [True, False])
def test_an_adapter_in_a_model_of_transformers(stored):
    """Without a PeftModel nothing else says where the invocation is."""
    tuned = adapted()
    model = tiny("llama", max_position_embeddings=256, num_hidden_layers=3).eval()
    model.set_attn_implementation("eager")
    model.add_adapter(tuned.peft_config["default"], "default")
    model.load_state_dict(tuned.get_base_model().state_dict(), strict=False)
    ids = prompt(text(20), INVOCATION, text(5, seed=4))
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    wanted = tuned(ids).logits[0, -1]
    with kvkeep.attach(model, store=PrefixStore() if stored else None):
        got = model.generate(ids, **options).logits[0][0]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids).logits[0, -1], wanted, atol=1e-3)


def test_where_the_last_invocation_begins():
    at = InvokedAdapter("default", (5, 6)).start
    assert at(torch.tensor([1, 5, 6, 2, 5, 6, 3])) == 4
    assert at(torch.tensor([5, 6])) == 0
    assert at(torch.tensor([5, 5, 6])) == 1
    assert at(torch.tensor([6, 5])) == NEVER
    assert at(torch.tensor([5])) == NEVER
    assert at(torch.tensor([], dtype=torch.int64)) == NEVER


def test_keys_say_which_adapter_computed_a_token():
    model, specs = tiny("llama"), []
    tokens = text(12)
    plain = keyed(host_of(model), tokens, specs)
    assert plain.keys.equal(tokens)
    found = [keyed(host_of(model), tokens, specs, "", Activation(7, digit * 32)) for digit in "01f"]
    for one in found:
        assert one.identity == plain.identity
        assert one.keys[:7].equal(tokens[:7])
        assert (one.keys & 0xFFFFFF).equal(tokens)
        assert bool((one.keys[7:] > 0xFFFFFF).all())
    assert not any(a.keys.eq(b.keys)[7:].any() for a, b in pairwise(found))
    late = keyed(host_of(model), tokens, specs, "", Activation(7, "0" * 24 + "1" + "0" * 7))
    assert late.keys.ne(found[0].keys).tolist() == [False] * 7 + [True, False, False, False, True]
    assert keyed(host_of(model), tokens, specs, "", Activation(NEVER, "f" * 32)).keys.equal(tokens)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_base_model_and_adapters_share_what_stands_before(tmp_path, on_disk):
    tuned, head = adapted(), text(30)
    invoked, other = prompt(head, INVOCATION, [7, 8]), prompt(head, text(5, seed=9))
    with tuned.disable_adapter():
        plain_base = tuned.generate(input_ids=other, **GREEDY)
    plain = {}
    for name in ("default", "other"):
        tuned.set_adapter(name)
        plain[name] = tuned.generate(input_ids=invoked, **GREEDY)
    assert not plain["default"].equal(plain["other"])
    backend = Disk(tmp_path / "store") if on_disk else None
    store = PrefixStore(backend=backend, block=8)
    kvkeep.attach(tuned, store=store)

    def found(ids, wanted):
        nonlocal store
        if on_disk:
            kvkeep.detach(tuned)
            store = PrefixStore(backend=backend, block=8)
            kvkeep.attach(tuned, store=store)
        before = store.stats().hit_tokens
        assert tuned.generate(input_ids=ids, **GREEDY).equal(wanted)
        return store.stats().hit_tokens - before

    with tuned.disable_adapter():
        assert found(other, plain_base) == 0
    tuned.set_adapter("default")
    assert found(invoked, plain["default"]) == 30
    assert found(invoked, plain["default"]) == 34
    tuned.set_adapter("other")
    assert found(invoked, plain["other"]) == 30
    assert found(other, plain_base) == 34  # without an invocation it is the base model
    store.check()


def test_slots_are_those_of_the_whole_run():
    """Before the invocation to the last bit the base model's, whatever is active."""
    tuned, head = adapted(), text(30)
    ids = prompt(head, INVOCATION, [7, 8])
    with torch.no_grad():
        wanted = tuned(input_ids=ids).logits[0]
    kvkeep.attach(tuned)
    with tuned.disable_adapter():
        base = PrefixStore().read(tuned, head).cache
    for chunk in (None, 7, 1):
        cache = PrefixStore().prefill(tuned, ids, chunk=chunk)
        with torch.inference_mode():
            logits = tuned.get_base_model()(ids[:, -1:], past_key_values=cache).logits[0]
        torch.testing.assert_close(logits, wanted[-1:], atol=1e-5, rtol=1e-5)
        if chunk is None:
            for mine, theirs in zip(cache.layers, base.layers, strict=True):
                a, b = (layer.state().parts["slots"] for layer in (mine, theirs))
                assert a["k"][:, :, :30].equal(b["k"])
                assert a["v"][:, :, :30].equal(b["v"])


def test_the_last_invocation_of_the_prompt_counts():
    tuned = adapted()
    first = prompt(text(20), INVOCATION, [7, 8])
    second = prompt(first[0], text(6, seed=5), INVOCATION, [9])
    wanted = [tuned.generate(input_ids=ids, **GREEDY) for ids in (first, second)]
    store = PrefixStore()
    kvkeep.attach(tuned, store=store)
    assert tuned.generate(input_ids=first, **GREEDY).equal(wanted[0])
    assert tuned.generate(input_ids=second, **GREEDY).equal(wanted[1])
    assert store.stats().hit_tokens == 20  # what the adapter computed is the base model's now


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 5}, {}])
def test_generating_in_pieces(options):
    tuned = adapted()
    ids = prompt(text(20), INVOCATION, [7, 8])
    wanted = tuned.generate(input_ids=ids, **GREEDY)
    kvkeep.attach(tuned, store=PrefixStore())
    for _ in range(2):
        assert tuned.generate(input_ids=ids, **GREEDY, **options).equal(wanted)
    inner = tuned.get_base_model()
    assert inner.generate(ids, **GREEDY).equal(wanted)
    kvkeep.detach(tuned)
    assert not any(module._forward_pre_hooks for module in inner.modules())


def test_in_a_loop_of_your_own():
    tuned, store = adapted(), PrefixStore()
    first = prompt(text(20), INVOCATION, [7, 8])
    second = prompt(first[0], [9, 10])
    wanted = [tuned.generate(input_ids=ids, **GREEDY) for ids in (first, second)]
    kvkeep.attach(tuned, store=store)
    inner = tuned.get_base_model()
    cache = store.prefill(inner, first)
    with torch.inference_mode():
        inner(first[:, -1:], past_key_values=cache)
    assert store.learn(inner, first, cache) == 25
    assert tuned.generate(input_ids=second, **GREEDY).equal(wanted[1])
    assert store.stats().hit_tokens == 25
    tuned.set_adapter("other")
    assert store.learn(inner, first, cache) == 0


def test_the_next_turn_invokes_it():
    tuned = adapted()
    first = prompt(text(20))
    second = prompt(first[0], text(6, seed=5), INVOCATION, [9])
    wanted = tuned.generate(input_ids=second, **GREEDY)
    kvkeep.attach(tuned)
    cache = PrefixStore().prefill(tuned, first)
    assert tuned.generate(input_ids=second, past_key_values=cache, **GREEDY).equal(wanted)


def test_what_cannot_be_stored():
    tuned, ids = adapted(modules_to_save=["lm_head"]), prompt(text(20), INVOCATION)
    kvkeep.attach(tuned)
    with pytest.raises(UnsupportedError, match="by itself"):
        PrefixStore().prefill(tuned, ids)
    both = adapted()
    both.base_model.set_adapter(["default", "other"])
    kvkeep.attach(both)
    with pytest.raises(UnsupportedError, match="by itself"):
        activation_in(both.get_base_model(), ids[0])
    one, store = adapted(), PrefixStore()
    kvkeep.attach(one, store=store)
    cache = kvkeep.Cache(one)
    with torch.inference_mode():
        one(input_ids=ids, past_key_values=cache)
    assert store.learn(one, ids, cache) == 0  # nobody knows which tokens the adapter computed
    assert store.stats().refused == 1


def test_adapters_named_for_one_call_pass_the_store_by():
    tuned = adapted()
    tuned.delete_adapter("other")
    plain = LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
    tuned.add_adapter("plain", plain)
    tuned.set_adapter("plain")
    ids = prompt(text(20))
    with tuned.disable_adapter():
        base = tuned.generate(input_ids=ids, **GREEDY)
    wanted = tuned.generate(input_ids=ids, **GREEDY)
    store = PrefixStore()
    kvkeep.attach(tuned, store=store)
    assert tuned.generate(input_ids=ids, adapter_names=["__base__"], **GREEDY).equal(base)
    assert store.stats().entries == 0
    assert tuned.generate(input_ids=ids, **GREEDY).equal(wanted)
    assert store.stats().entries == 1


def test_blocks_before_the_invocation():
    tuned = adapted()
    parts = [text(n, seed=n) for n in (5, 20, 6, 20)]
    parts[1][4:7] = torch.tensor(INVOCATION)  # not the last one
    ids = prompt(*parts, INVOCATION, [7])
    spans = [Span(5, 25), Span(31, 51)]
    wanted = expected_apart(tuned, ids, spans, 1)
    with torch.no_grad():
        plain = tuned(input_ids=ids).logits[0, -1:]
    kvkeep.attach(tuned)
    store = PrefixStore()

    def logits(recompute, *more):
        encoded = Encoded(ids[0], [BlockTokens("", span) for span in (*spans, *more)])
        cache, report = encoded.prefill(tuned.get_base_model(), store=store, recompute=recompute)
        with torch.inference_mode():
            out = tuned.get_base_model()(ids[:, -1:], past_key_values=cache).logits[0]
        return out, report

    found, report = logits(0)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    found, report = logits(0.9999)
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    assert report.found == 40
    _, report = logits(0, Span(50, 54))
    assert [bool(block.refused) for block in report.blocks] == [False, False, True]
    assert "is active from token 51 on" in report.blocks[2].refused


# -- a real one -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def example():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import alora

    sys.path.pop(0)
    return alora


@pytest.fixture(scope="session")
def trained(example, tmp_path_factory):
    """An adapter of SmolLM2, trained once for all workers."""
    folder = tmp_path_factory.getbasetemp().parent / "adapter"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            example.train(folder)
    return folder


@pytest.mark.slow
def test_a_real_adapter(example, trained):
    from kvkeep.hf.models import load

    model, tokenizer = load("smollm2-135m", "float32", "cpu")
    tuned = PeftModel.from_pretrained(model, trained).eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    prompts = [
        (word, sentence.format(word))
        for word in example.NEW_WORDS
        for sentence in example.NEW_SENTENCES[:1]
    ]

    def answers(invocation, prompts):
        found = []
        for _, said in prompts:
            whole = example.message(said) + invocation
            ids = tokenizer(whole, return_tensors="pt").input_ids
            output = tuned.generate(input_ids=ids, **options)
            found.append(tokenizer.decode(output[0, ids.shape[1] :]))
        return found

    wanted = answers(example.INVOCATION, prompts)
    right = [
        a.startswith(f"{word}<|im_end|>") for a, (word, _) in zip(wanted, prompts, strict=True)
    ]
    assert sum(right) >= 10
    some = prompts[:4]
    with tuned.disable_adapter():
        base = answers(example.INVOCATION, some)
    assert not any(a == b for a, b in zip(wanted, base, strict=False))
    store = PrefixStore()
    kvkeep.attach(tuned, store=store)
    with tuned.disable_adapter():
        answers("<|im_start|>assistant\n", some)
    before = store.stats().hit_tokens
    assert answers(example.INVOCATION, some) == wanted[:4]
    heads = sum(len(tokenizer(example.message(said)).input_ids) for _, said in some)
    assert store.stats().hit_tokens - before == heads


@pytest.mark.slow
def test_the_example(example, trained, capsys):
    example.main(str(trained))
    said = capsys.readouterr().out
    assert int(said.splitlines()[-1].split()[0]) >= 3
    assert "[17 of 20 tokens found]" in said


def test_the_example_of_a_tiny_model(example, capsys, tmp_path, monkeypatch):
    """It learns nothing, but is trained, saved, loaded and used."""
    monkeypatch.setenv("KVKEEP_HOME", stand_in(tmp_path)["KVKEEP_HOME"])
    example.main()
    said = capsys.readouterr().out
    assert said.splitlines()[-1].endswith(" of 4 right")
    found = re.findall(r"\[(\d+) of (\d+) tokens found\]", said)
    assert (
        sum(int(prompt) - int(known) == 5 for known, prompt in found) >= 3
    )  # all but the activation
