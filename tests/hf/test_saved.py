"""Saved caches of whole models: the same model goes on, another is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product

import pytest
import torch
from support.slow import every
from support.tiny_models import growing_rope, tiny
from support.two_layer_caches import same
from torch.testing._internal.two_tensor import TwoTensor
from transformers.utils.quantization_config import QuantizationMethod

import kvkeep
from kvkeep.errors import SavedCacheError, StateError, UnsupportedError
from kvkeep.files.snapshot import save
from kvkeep.hf.loading.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = [
    "keep_all",
    "keep_all@fixed",
    "window:12,sinks=2+int8@fixed",
    "adakv(h2o:16)",
    "snapkv:40,window=32",
]


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def ids(model):
    return torch.randint(3, model.config.vocab_size, (2, 30))


def follow(model, cache, ids, steps=6):
    """Logits of some greedy steps."""
    found = []
    with torch.no_grad():
        for _ in range(steps):
            logits = model(ids, past_key_values=cache).logits
            ids = logits[:, -1:].argmax(dim=-1)
            found.append(logits[:, -1])
    return torch.stack(found), ids


@pytest.mark.parametrize(
    ("family", "spec"), every(2, product(["llama", "mistral", "gemma3"], SPECS))
)
def test_goes_on_to_the_last_bit(tmp_path, family, spec):
    model = tiny(family)
    ids = torch.randint(3, model.config.vocab_size, (2, 30))
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        _, last = follow(model, cache, ids)
        cache.save(tmp_path / "a.kv", tokens=ids)
        given = []
        loaded = kvkeep.load(tmp_path / "a.kv", model, tokens=given.append)
        assert given[0].equal(ids)
        assert loaded.specs == cache.specs
        snapshot, fork = cache.snapshot(), cache.freeze().fork()
        restored = kvkeep.Cache(model, spec)
        restored.restore(snapshot)
        expected, _ = follow(model, cache, last)
        fork.save(tmp_path / "b.kv")
        reloaded = kvkeep.load(tmp_path / "b.kv", model)
        for other in (loaded, fork, restored, reloaded):
            assert same([follow(model, other, last)[0]], [expected])


def test_unattached(tmp_path, model, ids):
    cache = kvkeep.Cache(model)
    _, last = follow(model, cache, ids)
    cache.save(tmp_path / "a.kv")
    loaded = kvkeep.load(tmp_path / "a.kv", model)
    fork = cache.freeze().fork()
    logits, _ = follow(model, loaded, last)
    assert follow(model, fork, last)[0].equal(logits)
    assert follow(model, cache, last)[0].equal(logits)
    with kvkeep.attach(model), pytest.raises(StateError, match="before it was attached"):
        follow(model, loaded, last)


def changed(model, how):
    other = copy.deepcopy(model)
    if how == "weights":
        with torch.no_grad():
            other.model.layers[-1].mlp.up_proj.weight[0, 0] += 1e-3
    elif how == "rope":
        other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5e5}
    elif how == "dtype":
        other.bfloat16()
    elif how == "config":
        other.config.hidden_act = "relu"
    elif how == "modules":
        other.model.norm.variance_epsilon = 0.5
    elif how == "buffers":
        other.model.rotary_emb.inv_freq[0] = 3.0
    return other


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("weights", "weights differ"),
        ("rope", r"rope\.rope_theta was 10000\.0, is 500000\.0"),
        ("dtype", r"dtype was torch\.float32, is torch\.bfloat16"),
        ("config", r'config\.hidden_act was "silu", is "relu"'),
        ("modules", "modules differ"),
        ("buffers", "buffers differ"),
    ],
)
def test_a_sibling_is_refused(tmp_path, model, ids, how, said):
    cache = kvkeep.Cache(model)
    follow(model, cache, ids)
    cache.save(tmp_path / "a.kv")
    sibling = changed(model, how)
    assert kvkeep.fingerprint(sibling) != kvkeep.fingerprint(model)
    with pytest.raises(SavedCacheError, match=f"made with another model: .*{said}"):
        kvkeep.load(tmp_path / "a.kv", sibling)
    assert kvkeep.load(tmp_path / "a.kv", sibling, force=True).fed == cache.fed
    with pytest.raises(SavedCacheError, match="holds 2 layers"):
        kvkeep.load(tmp_path / "a.kv", tiny("llama", num_hidden_layers=3), force=True)


def test_crafted_headers(tmp_path, model, ids):
    """Whatever a header says, only one kind of error comes of it."""
    cache = kvkeep.Cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    path = tmp_path / "a.kv"
    own, layers = fingerprint(model), len(cache.layers)
    for spec in ("no_such", "window:-1", "window:4+int8:3", "keep_all@fixed:" + "9" * 17):
        save(cache, path, specs=[spec] * layers, fingerprint=own)
        with pytest.raises(SavedCacheError):
            kvkeep.load(path, model)
    save(cache, path, specs=["keep_all"] * layers, fingerprint=own | {"config": "[" * 5000})
    with pytest.raises(SavedCacheError, match="config differs"):
        kvkeep.load(path, model)


def test_a_fingerprint_of_fewer_parts(tmp_path, model, ids, monkeypatch):
    """As of a file that was written before one of them was known."""
    cache = kvkeep.Cache(model)
    follow(model, cache, ids)
    whole = kvkeep.fingerprint(model)
    less = {name: x for name, x in whole.items() if name != "buffers"}
    with monkeypatch.context() as then:
        then.setattr("kvkeep.hf.host.fingerprint", lambda *_, **__: less)
        cache.save(tmp_path / "a.kv")
    with pytest.raises(SavedCacheError, match="buffers: not recorded then;"):
        kvkeep.load(tmp_path / "a.kv", model)


def test_where_a_model_came_from_does_not_count(model):
    """What transformers writes into the config of a model that it read from a GGUF file."""
    before = kvkeep.fingerprint(model)
    for name in ("a.gguf", "b.gguf"):
        read = copy.deepcopy(model)
        read.config._name_or_path = read.name_or_path = f"/models/{name}"
        read.config.architectures = None
        read.config.quantization_config = {
            "quant_method": QuantizationMethod.GGUF,
            "gguf_file": name,
            "dequantize": False,
        }
        read.is_quantized = True
        assert kvkeep.fingerprint(read) == before
    read.config.quantization_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert kvkeep.fingerprint(read) != before
    with kvkeep.attach(model):
        assert kvkeep.fingerprint(model) == before


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "mixtral", "gpt2", "deepseek-v3"])
def test_use_and_a_file_leave_a_fingerprint_as_it_is(tmp_path, family):
    model = tiny(family)
    before = kvkeep.fingerprint(model)
    with kvkeep.attach(model):
        model.generate(torch.arange(2, 22)[None], max_new_tokens=2, do_sample=False)
        assert kvkeep.fingerprint(model) == before
    model.save_pretrained(tmp_path)
    assert kvkeep.fingerprint(type(model).from_pretrained(tmp_path)) == before


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_of_a_text(kind):
    rope = growing_rope(kind)
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    before = kvkeep.fingerprint(model)
    model(torch.arange(2, 92)[None])
    assert kvkeep.fingerprint(model) == before
    longer = tiny("llama", rope_parameters=rope, max_position_embeddings=128)
    assert kvkeep.fingerprint(longer)["rope"] != before["rope"]


def test_quantised_models(model):
    before = kvkeep.fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to move it elsewhere
        one = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        model.model.layers[-1].mlp.up_proj.weight.data[0] *= 2
        other = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    found = kvkeep.fingerprint(one)
    assert kvkeep.fingerprint(one, glance=True) == found == kvkeep.fingerprint(copy.deepcopy(one))
    assert len({x["weights"] for x in (before, found, kvkeep.fingerprint(other))}) == 3


def test_weights_that_are_made_of_others(model):
    before = kvkeep.fingerprint(model)
    layer = model.model.layers[0].mlp.up_proj
    one = layer.weight.detach()
    layer.weight = torch.nn.Parameter(TwoTensor(one.clone(), one.clone()))
    found = kvkeep.fingerprint(model, glance=True)
    assert found["weights"] != before["weights"]
    layer.weight.b.data.view(-1)[0] += 1  # the first of an unlabelled tensor is looked at
    assert kvkeep.fingerprint(model, glance=True)["weights"] != found["weights"]


def test_weights_that_are_nowhere(model):
    model.model.norm.to("meta")
    with pytest.raises(UnsupportedError, match=r"norm\.weight is .* on meta"):
        kvkeep.fingerprint(model)


def test_weights_that_change_are_seen(model):
    before = kvkeep.fingerprint(model)
    assert kvkeep.fingerprint(model) == before == kvkeep.fingerprint(copy.deepcopy(model))
    model.lm_head.weight.data[3, 3] += 1
    assert kvkeep.fingerprint(model)["weights"] != before["weights"]


def test_adapters(model):
    import peft

    before = kvkeep.fingerprint(model)
    assert before["adapter"] == "none"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    found = kvkeep.fingerprint(adapted)
    assert found["weights"] == before["weights"]
    assert found["adapter"] != "none"
    assert kvkeep.fingerprint(adapted.base_model.model) == found
    with adapted.disable_adapter():
        assert kvkeep.fingerprint(adapted) == before
    for module in adapted.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.set_scale("default", 5.0)
    assert kvkeep.fingerprint(adapted)["adapter"] != found["adapter"]


def test_other_kinds_of_adapters(model):
    import peft

    before = kvkeep.fingerprint(model)
    config = peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    adapted = peft.get_peft_model(model, config)
    assert kvkeep.fingerprint(adapted)["weights"] == before["weights"]
    assert kvkeep.fingerprint(adapted)["adapter"] != "none"
    with adapted.disable_adapter():
        assert kvkeep.fingerprint(adapted) == before


def test_an_interrupted_forward_is_restored_from(model, ids):
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(ids, past_key_values=cache)
        snapshot = cache.snapshot()
        for back in (lambda: cache.restore(snapshot), lambda: cache.rewind(30)):
            cache.update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0)
            back()
            model(ids[:, :1], past_key_values=cache)
            assert cache.fed == 31


def test_pickled(model, ids):
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, "h2o:20")
        _, last = follow(model, cache, ids)
        other = pickle.loads(pickle.dumps(cache))
        expected, _ = follow(model, cache, last)
        assert same([follow(model, other, last)[0]], [expected])


def test_tokenizers(smollm2, tmp_path):
    model, tokenizer = smollm2
    cache = kvkeep.Cache(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    cache.save(tmp_path / "a.kv", tokenizer=tokenizer)
    assert kvkeep.load(tmp_path / "a.kv", model, tokenizer=tokenizer).fed == 3
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages }}"
    with pytest.raises(SavedCacheError, match="tokenizer differs in chat template"):
        kvkeep.load(tmp_path / "a.kv", model, tokenizer=other)


def test_whose_keys_they_are_must_be_known(tmp_path, model, ids):
    cache = kvkeep.Cache(model.config)
    follow(model, cache, ids)
    with pytest.raises(StateError, match=r"give save\(model=\.\.\.\)"):
        cache.save(tmp_path / "a.kv")
    cache.save(tmp_path / "a.kv", model=model)
    assert kvkeep.load(tmp_path / "a.kv", model).fed == cache.fed


def test_best_of_n_shares_its_prompt(model, ids):
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model)
        model(ids[:1], past_key_values=cache)
        fork = cache.freeze().fork(rows=5)
        shared = fork.stats().shared_bytes
        following = torch.randint(3, model.config.vocab_size, (5, 4))
        out = model(following, past_key_values=fork).logits
        assert fork.stats().shared_bytes == shared == cache.stats().shared_bytes
        whole = torch.cat([ids[:1].expand(5, -1), following], dim=1)
        expected = model(whole, use_cache=False).logits[:, -4:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_glance_sees_what_changes():
    model = tiny("llama")
    first = kvkeep.fingerprint(model, glance=True)
    assert kvkeep.fingerprint(model, glance=True) == first
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()

    def poke():
        with torch.no_grad():
            weight[1, 1] += 1

    changes = [
        poke,
        lambda: weight.data.mul_(1.5),  # which torch does not count as a change
        lambda: model.model.embed_tokens.weight.data[7].add_(1),
        lambda: model.load_state_dict(
            {**model.state_dict(), "lm_head.weight": before.new_ones(96, 32)}
        ),
        lambda: setattr(weight, "data", before * 2),
        lambda: model.model.rotary_emb.inv_freq.data.mul_(2),
        lambda: setattr(model.model.norm, "variance_epsilon", 0.25),
        lambda: setattr(model.model.layers[1].self_attn, "scaling", 0.3),
        lambda: model.bfloat16(),
    ]
    seen = [first]
    for change in changes:
        change()
        found = kvkeep.fingerprint(model, glance=True)
        assert found not in seen
        assert kvkeep.fingerprint(model) == found
        seen.append(found)
    assert kvkeep.fingerprint(tiny("llama")) == first


def test_a_glance_knows_what_was_read():
    """What it cannot see, it is told by reading everything."""
    model = tiny("llama")
    first = kvkeep.fingerprint(model, glance=True)
    model.lm_head.weight.data[3, 3] += 1
    assert kvkeep.fingerprint(model, glance=True) == first
    whole = kvkeep.fingerprint(model)
    assert whole != first
    assert kvkeep.fingerprint(model, glance=True) == whole
