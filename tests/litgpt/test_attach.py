"""LitGPT models through kvkeep's caches, against LitGPT's own and against no cache."""

from __future__ import annotations

import copy

import pytest
import torch
from litgpt.generate.base import generate
from support.tiny_litgpt import FAMILIES, tiny_gpt

import kvkeep
from kvkeep.errors import ShapeError, SpecError, StateError, UnsupportedError
from kvkeep.host import host_of
from kvkeep.store import PrefixStore

STEPS = 9


def ids(n=20, seed=3, rows=1):
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def without_cache(gpt, prompt, steps=STEPS):
    for _ in range(steps):
        prompt = torch.cat([prompt, gpt(prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@torch.no_grad()
def with_cache(gpt, prompt, steps=STEPS, chunk=None):
    """As LitGPT's loops do it: positions, and no other word of a cache."""
    at = 0
    for piece in prompt.split(chunk or prompt.shape[1], dim=1):
        logits = gpt(piece, torch.arange(at, at + piece.shape[1]))
        at += piece.shape[1]
    for _ in range(steps):
        prompt = torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1)
        logits = gpt(prompt[:, -1:], torch.tensor([at]), input_pos_maxp1=at + 1)
        at += 1
    return prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_no_cache_and_of_litgpts_own(family):
    gpt, prompt = tiny_gpt(family), ids(10, rows=2)
    expected = without_cache(gpt, prompt)
    if gpt.config.attention_logit_softcapping is None:  # else it adds its bool mask to the scores
        gpt.set_kv_cache(batch_size=2)
        assert with_cache(gpt, prompt).equal(expected)
        gpt.clear_kv_cache()
    with kvkeep.attach(gpt):
        assert with_cache(gpt, prompt).equal(expected)
        assert with_cache(gpt, prompt, chunk=3).equal(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_long_prompt(family):
    gpt, prompt = tiny_gpt(family), ids(60)
    with torch.no_grad():
        expected = gpt(prompt)
        with kvkeep.attach(gpt):
            found = [
                gpt(piece, torch.arange(start, start + piece.shape[1]))
                for start, piece in zip((0, 25, 50), prompt.split(25, dim=1), strict=True)
            ]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_litgpts_own_generate():
    from litgpt.generate.base import batched_generate_fn, generate

    gpt, prompt = tiny_gpt("gemma3"), ids(20)
    expected = without_cache(gpt, prompt)
    options = {"temperature": 0.0, "top_p": 0.0}
    with kvkeep.attach(gpt, "keep_all+int8") as attachment:
        gpt.set_kv_cache(batch_size=1)  # as LitGPT's scripts do
        assert generate(gpt, prompt[0], 29, **options).shape == (29,)
        assert attachment.cache.fed == 28
    with kvkeep.attach(gpt):
        assert generate(gpt, prompt[0], 29, **options).equal(expected[0])
        two = prompt.expand(2, -1)
        given = {"sample_args": options, "include_prompt": False, "include_eos": True}
        columns = list(batched_generate_fn(gpt, two, 29, **given))
        assert torch.stack([torch.cat(x) for x in columns], dim=1).equal(
            expected[:, 20:].expand(2, -1)
        )


@pytest.mark.slow  # loads a model of 135 million weights
@torch.no_grad()
def test_a_real_checkpoint(smollm2):
    """The same greedy text by transformers, and by LitGPT without a cache, with its own, and with
    kvkeep's."""
    from kvkeep_lab.bench.litgpt_systems import converted

    model, tokenizer = smollm2
    gpt = converted(model)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    steps = expected.shape[1] - prompt.shape[1]
    assert without_cache(gpt, prompt, steps).equal(expected)
    gpt.max_seq_length = 64
    gpt.set_kv_cache(batch_size=1)
    assert with_cache(gpt, prompt, steps).equal(expected)
    gpt.clear_kv_cache()
    with kvkeep.attach(gpt, linears=True):
        assert with_cache(gpt, prompt, steps).equal(expected)


def test_nothing_is_allocated_for_the_context():
    gpt = tiny_gpt()
    with kvkeep.attach(gpt):
        gpt.set_kv_cache(batch_size=8)
        assert gpt.mask_cache.untyped_storage().nbytes() == 1
        assert not list(gpt.transformer.h[0].attn.kv_cache.buffers())


def test_rows_of_different_lengths():
    gpt = tiny_gpt()
    short, long = ids(6, 1), ids(11, 2)
    expected = [without_cache(gpt, one)[:, -STEPS:] for one in (short, long)]
    fed = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.int64), short], dim=1), long])
    at = torch.stack([torch.arange(-5, 6).clamp(min=-1), torch.arange(11)])
    found = []
    with kvkeep.attach(gpt), torch.no_grad():
        for _ in range(STEPS):
            fed = gpt(fed, at)[:, -1:].argmax(-1)
            at = at[:, -1:] + 1
            found.append(fed)
    assert torch.cat(found, dim=1).equal(torch.cat(expected))


@pytest.mark.parametrize(
    "spec",
    ["h2o:16", "qh2o:16+int8", "window:12", "keep_all+int8", "keep_all+int4", "snapkv:20,window=4"],
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_any_spec(spec, chunk):
    gpt, prompt = tiny_gpt(), ids(40)
    host = host_of(gpt)
    with kvkeep.attach(gpt, spec) as attachment, torch.no_grad():
        found = with_cache(gpt, prompt, chunk=chunk)
        assert found.shape == (1, 40 + STEPS)
        held = attachment.cache
        assert held.fed == 40 + STEPS
        if "keep_all" not in spec:
            assert held.length < 30
        cache = host.new_cache(spec)
        for piece in prompt.split(chunk or 40, dim=1):
            logits = host.forward(piece, cache)
        for column in range(40, 40 + STEPS):
            token = logits[:, -1:].argmax(-1)
            assert token.equal(found[:, column : column + 1])
            logits = host.forward(token, cache)


def test_an_earlier_position_removes_what_follows_it():
    gpt, prompt = tiny_gpt(), ids(20)
    expected = without_cache(gpt, prompt)
    with kvkeep.attach(gpt) as attachment, torch.no_grad():
        gpt(prompt, torch.arange(20))
        gpt(ids(5, 9), torch.arange(20, 25))
        logits = gpt(prompt[:, 15:], torch.arange(15, 20))
        assert attachment.cache.fed == 20
        assert logits[0, -1].argmax() == expected[0, 20]


def test_bad_input():
    gpt, prompt = tiny_gpt(), ids(20)
    with kvkeep.attach(gpt, "h2o:8") as attachment, torch.no_grad():
        with pytest.raises(StateError, match="attached already"):
            kvkeep.attach(gpt)
        gpt(prompt, torch.arange(20))
        with pytest.raises(StateError, match="begins at 22, but the cache was fed 20"):
            gpt(prompt[:, :1], torch.tensor([22]))
        with pytest.raises(ShapeError, match="129 positions, but the model has 128"):
            gpt(prompt[:, :1], torch.tensor([128]))
        with pytest.raises(ShapeError, match="129 positions, but the model has 128"):
            host_of(gpt).forward(ids(129), host_of(gpt).new_cache())
        with pytest.raises(ShapeError, match="does not follow"):
            gpt(prompt[:, :2], torch.tensor([20, 22]))
        with pytest.raises(ShapeError, match=r"of one text ids\[None\]"):
            gpt(prompt[0, :2], torch.tensor([20, 21]))
        with pytest.raises(kvkeep.RollbackError):
            gpt(prompt[:, :1], torch.tensor([3]))
        assert attachment.cache.fed == 20
        gpt(prompt[:, :1], torch.tensor([20]))
    with pytest.raises(StateError, match="not attached"):
        kvkeep.detach(gpt)
    with pytest.raises(StateError, match="not attached"):
        host_of(gpt).forward(prompt, host_of(gpt).new_cache())
    with pytest.raises(SpecError):
        kvkeep.attach(gpt, "h3o:8")
    with pytest.raises(UnsupportedError, match="store"):
        kvkeep.attach(gpt, store=kvkeep.PrefixStore())
    assert gpt.mask_cache is None


def test_other_attention_is_refused():
    from litgpt import adapter

    config = adapter.Config.from_name("pythia-14m", n_layer=3, block_size=64)
    with pytest.raises(UnsupportedError, match=r"litgpt\.adapter\.Causal"):
        kvkeep.attach(adapter.GPT(config))


@pytest.mark.parametrize("with_own_cache", [False, True])
def test_detach_leaves_the_model_as_it_was(with_own_cache):
    gpt, prompt = tiny_gpt(), ids(20)
    if with_own_cache:
        gpt.set_kv_cache(batch_size=1)
    before = {name: copy.copy(module.__dict__) for name, module in gpt.named_modules()}
    kvkeep.attach(gpt)
    with torch.no_grad():
        gpt(prompt, torch.arange(20))
    kvkeep.detach(gpt)
    for name, module in gpt.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        for key, value in before[name].items():
            assert module.__dict__[key] is value or module.__dict__[key] == value, (name, key)
    gpt.set_kv_cache(batch_size=1)
    assert with_cache(gpt, prompt).equal(without_cache(gpt, prompt))


def test_training_forwards_run_as_before():
    gpt, prompt = tiny_gpt(), ids(20)
    expected = gpt(prompt)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in gpt.parameters()]
    gpt.zero_grad()
    with kvkeep.attach(gpt):
        found = gpt(prompt)
        found.sum().backward()
    assert found.equal(expected)
    for parameter, gradient in zip(gpt.parameters(), gradients, strict=True):
        assert parameter.grad.equal(gradient)


def test_a_spec_that_compresses_is_refused_by_the_models_own_forwards():
    gpt, prompt = tiny_gpt(), torch.arange(2, 32)
    with torch.no_grad(), kvkeep.attach(gpt, "kvzip:50%") as attachment:
        with pytest.raises(UnsupportedError, match=r"kvzip:50%.*read\(gpt, ids, spec=\.\.\.\)"):
            generate(gpt, prompt, 40, temperature=0.0, top_p=0.0)
        assert attachment.cache.fed == 0
        attachment.cache = PrefixStore().read(gpt, prompt, spec="kvzip:50%").cache
        assert attachment.cache.length < attachment.cache.fed == 30
        gpt(torch.tensor([[7]]), torch.tensor([30]))
        assert attachment.cache.fed == 31
