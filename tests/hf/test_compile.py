"""torch.compile: one graph without breaks for a whole generation, and the same tokens."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from support.tiny_models import tiny
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvkeep
from kvkeep.errors import StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_graphs")

SPECS = [
    "keep_all@fixed:300",
    "keep_all+int8@fixed:300",
    "window:32,sinks=2@fixed",
    "window:32,sinks=2+int8@fixed",
    "h2o:40+int4",
    "keep_all",
]


def prompt(model, tokens=9):
    return torch.randint(3, model.config.vocab_size, (2, tokens))


def said(model, step, spec, ids, steps):
    cache = kvkeep.Cache(model, spec)
    found = []
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        for _ in range(steps):
            token = step(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
            found.append(token)
    return torch.cat([ids[:, :0], *found], dim=1), cache


ALL = [("llama", spec) for spec in SPECS]
LATENT = ("deepseek-v3", "window:12")
ALL += [("mistral", SPECS[3]), ("gemma3", SPECS[2]), ("gemma3", SPECS[4]), LATENT]
QUICK = {
    ("gemma3", SPECS[4]),
    LATENT,
}  # the next test has llama, with caches that grow and that do not
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_one_graph_for_a_generation(family, spec):
    steps = 14
    layers = 1 + (family == "gemma3")  # one of each kind
    model = tiny(family, max_position_embeddings=512, num_hidden_layers=layers)
    ids = prompt(model, 30)
    with kvkeep.attach(model):
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        expected, eager = said(model, model.forward, spec, ids, steps)
        tokens, cache = said(model, step, spec, ids, steps)
        assert tokens.equal(expected)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        # Another cache, in the same graph; and both go on uncompiled.
        again, _ = said(model, step, spec, prompt(model), steps=3)
        assert counters["stats"]["unique_graphs"] == 1
        assert again.shape == (2, 3)
        with torch.no_grad():
            last = tokens[:, -1:]
            after, uncompiled = (model(last, past_key_values=c).logits for c in (cache, eager))
        assert after.equal(uncompiled)
        assert cache.stats() == eager.stats()


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_one_graph_for_caches_of_all_specs_in_turns(family):
    layers = 1 + (family == "gemma3")
    model = tiny(family, max_position_embeddings=512, num_hidden_layers=layers)
    ids = prompt(model)
    with kvkeep.attach(model):
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        for spec in ("keep_all", "keep_all@fixed:64", "adakv(h2o:20)", "window:32@concat"):
            tokens, _ = said(model, step, spec, ids, steps=2)
            assert tokens.equal(said(model, model.forward, spec, ids, steps=2)[0])
        cache = said(model, model.forward, "keep_all", ids, steps=0)[1]
        fork = cache.freeze().fork()
        with torch.no_grad():
            step(ids[:, :1].contiguous(), past_key_values=fork)
        assert (cache.fed, fork.fed) == (9, 10)  # a fork has tickets of its own
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", SPECS[3]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma3", "h2o:40@fixed"),
                *(("llama", spec) for spec in (*SPECS[:3], "h2o:40@fixed")),
                ("mistral", SPECS[0]),
                ("gemma3", SPECS[3]),
            )
        ),
    ],
)
def test_generate_compiles(family, spec):
    model = tiny(family, max_position_embeddings=512, num_hidden_layers=1 + (family == "gemma3"))
    ids = prompt(model, 30)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    options._compile_all_devices = True  # by itself it compiles on accelerators only
    asked = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    with kvkeep.attach(model):
        cache, growing = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec.split("@")[0])
        assert cache.is_compileable
        assert not growing.is_compileable
        tokens = model.generate(ids, past_key_values=cache, compile_config=options, **asked)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert tokens.equal(model.generate(ids, past_key_values=growing, **asked))
        assert cache.seen.equal(growing.seen)
    assert not kvkeep.Cache(model, spec).is_compileable


@pytest.mark.slow
def test_inductor():
    model = tiny("llama")
    ids = prompt(model)
    with kvkeep.attach(model):
        step = torch.compile(model.forward, fullgraph=True)
        tokens, _ = said(model, step, "window:32,sinks=2+int8@fixed", ids, steps=12)
        expected, _ = said(model, model.forward, "window:32,sinks=2+int8@fixed", ids, steps=12)
        assert tokens.equal(expected)
        assert counters["stats"]["unique_graphs"] == 1


def test_padding():
    model = tiny("llama", num_hidden_layers=1)
    ids = prompt(model)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with kvkeep.attach(model), torch.no_grad():
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        logits = []
        for forward in (model.forward, step):
            cache = kvkeep.Cache(model, "keep_all@fixed:64")
            forward(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
            logits.append(model(ids[:, 5:], past_key_values=cache).logits)
            assert cache.seen.tolist() == [5, 9]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_bad_input():
    model = tiny("llama", num_hidden_layers=1)
    cache = kvkeep.Cache(model, "keep_all@fixed:64")
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="needs an attached model") as error:
        step(prompt(model), past_key_values=cache)
    assert isinstance(error.value, UnsupportedError) or "UnsupportedError" in str(error.value)
    ticket = kvkeep.Cache(model)._traced[0]
    gc.collect()
    with pytest.raises(StateError, match="a cache that no longer exists"):
        _ = ticket.fed


def test_a_call_that_compiles_nothing_says_so():
    model = tiny("llama", num_hidden_layers=1)
    ids = prompt(model)
    options = {"max_new_tokens": 3, "do_sample": False}
    asked = CompileConfig(fullgraph=True, backend="eager", mode=None)
    asked._compile_all_devices = True
    remedy = r"compiles nothing with the cache keep_all\+plain@growing.*@fixed.*compile=True"
    with kvkeep.attach(model):
        expected = model.generate(ids, **options)
        for cache in (None, kvkeep.Cache(model)):
            with pytest.warns(UserWarning, match=remedy):
                found = model.generate(ids, compile_config=asked, past_key_values=cache, **options)
            assert found.equal(expected)
    with kvkeep.attach(model, "keep_all@fixed"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert model.generate(ids, compile_config=asked, **options).equal(expected)
