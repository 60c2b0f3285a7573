"""Hooks of a model's user: what is computed under them serves no one else."""

from __future__ import annotations

import functools
import types
import warnings

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.sweep_configs import model_of
from support.tiny_litgpt import tiny_gpt
from support.tiny_models import tiny
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import kvkeep
from kvkeep.blocks.prompt import Encoded
from kvkeep.blocks.tokenize import BlockTokens, Span
from kvkeep.errors import SavedCacheError, UnsupportedError
from kvkeep.host.hooks import foreign_hooks
from kvkeep.store import PrefixStore

pytestmark = pytest.mark.usefixtures("without_gradients")

IDS = torch.randint(2, 90, (1, 30), generator=torch.Generator().manual_seed(5))
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def louder(module, inputs, output):
    return output * 3


def hook_of_a_module(model):
    return model.model.layers[0].mlp.register_forward_hook(louder).remove


def pre_hook_of_a_module(model):
    layer = model.model.layers[0].mlp
    return layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,)).remove


def hook_of_all_modules(model):
    def hook(module, inputs, output):
        return output * 3 if module is model.model.layers[0].mlp else None

    return register_module_forward_hook(hook).remove


def pre_hook_of_all_modules(model):
    def hook(module, inputs):
        return (inputs[0] * 3,) if module is model.model.layers[0].mlp else None

    return register_module_forward_pre_hook(hook).remove


def another_forward(model):
    layer = model.model.layers[0].mlp
    own = layer.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return own(*args, **kwargs) * 3

    layer.forward = forward
    return functools.partial(layer.__dict__.pop, "forward")


def a_partial(model):
    hook = functools.partial(lambda by, _, inputs, output: output * by, 3)
    return model.model.layers[0].mlp.register_forward_hook(hook).remove


def a_decorated_hook(model):
    return model.model.layers[0].mlp.register_forward_hook(torch.no_grad()(louder)).remove


def a_hook_of_accelerate(model):
    class Louder(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 3

    layer = model.model.layers[0].mlp
    hook = accelerate.hooks.SequentialHook(accelerate.hooks.ModelHook(), Louder())
    accelerate.hooks.add_hook_to_module(layer, hook)
    return functools.partial(accelerate.hooks.remove_hook_from_module, layer)


WAYS = [
    hook_of_a_module,
    pre_hook_of_a_module,
    hook_of_all_modules,
    pre_hook_of_all_modules,
    another_forward,
    a_partial,
    a_decorated_hook,
    a_hook_of_accelerate,
]


@pytest.mark.parametrize("hook", WAYS)
def test_a_store_keeps_hooked_and_plain_apart(hook):
    model, store = tiny("llama"), PrefixStore()
    plain = model.generate(IDS, **GREEDY)
    kvkeep.attach(model, store=store)
    remove = hook(model)
    with pytest.warns(UserWarning, match="without the store: hooks may change keys and values"):
        hooked = model.generate(IDS, **GREEDY)
    assert not hooked.equal(plain)
    assert store.nbytes == 0
    remove()
    for found in (0, IDS.shape[1] - 1):
        before = store.stats().hit_tokens
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert model.generate(IDS, **GREEDY).equal(plain)
        assert store.stats().hit_tokens - before == found
    remove = hook(model)
    try:
        with pytest.warns(UserWarning, match="without the store"):
            assert model.generate(IDS, **GREEDY).equal(hooked)
        with pytest.warns(UserWarning, match="without the store"):
            assert model.generate(IDS.repeat(2, 1), **GREEDY)[:1].equal(hooked)
        assert store.stats().hit_tokens - before == IDS.shape[1] - 1
        for use in (store.find, store.read, store.prefill):
            with pytest.raises(UnsupportedError, match="remove the hook, or use neither stores"):
                use(model, IDS)
        cache = kvkeep.Cache(model)
        model(IDS, past_key_values=cache)
        refused = store.stats().refused
        assert store.learn(model, IDS, cache) == 0
        assert store.stats().refused == refused + 1
    finally:
        remove()


def test_the_error_names_the_module_and_the_hook():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(louder)
    expected = r"model\.layers\.0\.mlp has a forward hook louder \(\w+-\d+\), and 1 more modules"
    with pytest.raises(UnsupportedError, match=expected):
        PrefixStore().read(model, IDS)


@pytest.mark.parametrize("hook", WAYS)
def test_a_file_serves_the_same_hooks_only(tmp_path, hook):
    model = tiny("llama")
    plain, hooked = tmp_path / "plain.kv", tmp_path / "hooked.kv"
    cache = kvkeep.Cache(model)
    model(IDS, past_key_values=cache)
    cache.save(plain)
    remove = hook(model)
    try:
        cache = kvkeep.Cache(model)
        model(IDS, past_key_values=cache)
        cache.save(hooked)
        kvkeep.load(hooked, model)
        with pytest.raises(SavedCacheError, match=r"hooks\..* was not set, is \""):
            kvkeep.load(plain, model)
        kvkeep.load(plain, model, force=True)
    finally:
        remove()
    kvkeep.load(plain, model)
    with pytest.raises(SavedCacheError, match=r"hooks\..* was \".*, is not set"):
        kvkeep.load(hooked, model)
    remove = hook(model)  # what another registration computes is not known
    try:
        with pytest.raises(SavedCacheError, match=r"hooks\.[^;]* was \".*, is \""):
            kvkeep.load(hooked, model)
    finally:
        remove()


def test_hooks_of_a_litgpt_model():
    gpt, store = tiny_gpt(), PrefixStore()
    with kvkeep.attach(gpt):
        assert foreign_hooks(gpt) == {}
        store.read(gpt, IDS)
        gpt.transformer.h[0].mlp.register_forward_hook(louder)
        with pytest.raises(UnsupportedError, match=r"transformer\.h\.0\.mlp has a forward hook"):
            store.read(gpt, IDS)


def test_blocks_are_computed_by_a_hooked_model():
    model = tiny("llama")
    model.model.layers[0].mlp.register_forward_hook(louder)
    expected = model.generate(IDS, **GREEDY)
    kvkeep.attach(model, store=PrefixStore())
    prompt = Encoded(IDS[0], [BlockTokens("", Span(5, 25))])
    _, report = prompt.prefill(model)
    assert "hooks may change keys and values" in report.blocks[0].refused
    assert model.generate(prompt, **GREEDY).equal(expected)


def test_known_libraries_hooks_are_part_of_the_model():
    model, store = model_of("jamba"), PrefixStore()
    with kvkeep.attach(model, store=store, linears=True):
        assert foreign_hooks(model) == {}
    model = tiny("llama")
    before = kvkeep.fingerprint(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert foreign_hooks(model) == {}
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.forward = types.MethodType(type(layer).forward, layer)
    layer.mlp.forward = torch.compile(layer.mlp.forward)
    model.enable_input_require_grads()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert foreign_hooks(model) == foreign_hooks(torch.compile(model)) == {}
    assert "hooks" not in before
    adapted = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    with kvkeep.attach(adapted, linears=True), adapted._enable_peft_forward_hooks(IDS):
        assert foreign_hooks(adapted) == {}


def test_a_forward_of_another_layer_is_foreign_where_its_user_wrote_it():
    class Mine(nn.Module):
        def forward(self, x):
            return x * 3

    model = tiny("llama")
    layer = model.model.layers[0]
    layer.mlp.forward = Mine().forward
    assert list(foreign_hooks(model)) == ["model.layers.0.mlp"]
    layer.mlp = Mine()  # a module's own class is part of the model
    assert foreign_hooks(model) == {}
