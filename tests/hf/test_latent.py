"""Models that cache a latent and expand it themselves attend to the slots that a policy keeps."""

from __future__ import annotations

import sys
from copy import deepcopy

import pytest
import torch
from kvkeep_lab.bench.decode_loop import buffers
from kvkeep_lab.bench.resident import in_core
from support import tiny_scorer
from support.random_ids import ids
from support.sweep_models import model_of
from support.tiny_models import tiny
from transformers import DeepseekV3Config, DynamicCache

import kvkeep
from kvkeep.errors import SpecError, StateError, UnsupportedError
from kvkeep.generate import SamplingParams, generate_many
from kvkeep.hf.kinds import latent

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = [9, 1, 1, 14, 3, 1, 1]  # 30 in all
POLICIES = [
    "window:8,sinks=2",
    "window:12",
    "h2o:10,recent=4",
    "snapkv:10,window=4,pool=3",
    "tova:10",
    "keydiff:10",
    "knorm:10,sinks=1",
    "random:10,sinks=1,recent=1",
    "expected_attention:10,recent=2",
    "pyramid:2(h2o:10)",
]
NEAR = {"atol": 5e-5, "rtol": 2e-4}


@pytest.fixture(scope="module")
def model():
    return tiny("deepseek-v3")


def kept(layer):
    """The positions that a layer keeps of each row."""
    return [sorted(p for p in row if p >= 0) for row in layer.positions()[:, 0].tolist()]


def masked(model, masks):
    """The model, told in a mask for each layer what its attention may see."""
    model = deepcopy(model)
    model.set_attn_implementation("eager")
    for index, layer in enumerate(model.model.layers):

        def own_mask(module, args, kwargs, index=index):
            return args, kwargs | {"attention_mask": masks[index]}

        layer.self_attn.register_forward_pre_hook(own_mask, with_kwargs=True)
    return model


def mask_of(held, columns, n, reach):
    """Additive (1, 1, n, columns) for the newest n tokens, before which these were held."""
    seen = torch.zeros(n, columns, dtype=torch.bool)
    for i in range(n):
        now = columns - n + i
        seen[i, [p for p in (*held, *range(columns - n, now + 1)) if reach(now, p)]] = True
    return torch.zeros(1, 1, n, columns).masked_fill(~seen, -torch.inf)


def follows_the_oracle(model, spec, chunks, tokens):
    policy = kvkeep.CacheSpec.parse(spec).policy
    size, sinks = (policy.size, policy.sinks) if policy.name == "window" else (1000, 0)
    masks: dict[int, torch.Tensor] = {}
    oracle, whole = masked(model, masks), DynamicCache()
    with kvkeep.attach(model) as attachment:
        assert attachment.attention == attachment.layers
        cache = kvkeep.Cache(model, spec)
        for part in tokens.split(chunks, dim=1):
            n, columns = part.shape[1], cache.fed + part.shape[1]
            for index, layer in enumerate(cache.layers):
                held = kept(layer)[0] if layer.fed else []
                masks[index] = mask_of(held, columns, n, lambda now, p: now - p < size or p < sinks)
            expected = oracle(part, past_key_values=whole).logits
            found = model(part, past_key_values=cache).logits
            torch.testing.assert_close(found, expected, **NEAR)
    return cache


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "chunks"),
    [(spec, CHUNKS) for spec in POLICIES]
    + [(spec, 1) for spec in POLICIES[:3]]
    + [pytest.param(spec, 1, marks=pytest.mark.slow) for spec in POLICIES[3:]],
)
def test_what_is_kept_is_what_is_seen(model, spec, chunks):
    cache = follows_the_oracle(model, spec, chunks, ids())
    assert min(layer.length for layer in cache.layers) < 30


@torch.no_grad()
@pytest.mark.parametrize("storage", ["fixed", "concat", "host"])
@pytest.mark.parametrize("spec", ["h2o:10,recent=4", "window:8,sinks=2"])
def test_storages(model, spec, storage):
    follows_the_oracle(model, f"{spec}@{storage}", CHUNKS, ids())


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "minicpm3", "longcat_flash", "glm4_moe_lite", "youtu", "axk1"]
)
def test_other_types(kind):
    model = model_of(kind)
    if kind == "longcat_flash":  # two attentions a layer
        tokens = ids()
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model, "h2o:10,recent=4")
            for part in tokens.split(CHUNKS, dim=1):
                assert model(part, past_key_values=cache).logits.isfinite().all()
    else:
        follows_the_oracle(model, "h2o:10,recent=4", CHUNKS, ids())


@torch.no_grad()
def test_the_mass_decides_as_the_weights_say(model):
    """H2O's scores, from the attention weights of a full cache: nothing is evicted before the last
    chunk, which must then go by the sums over all queries and heads."""
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    received = eager(ids(), output_attentions=True, use_cache=False).attentions
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, "h2o:16,recent=4,sinks=0,normalize=0")
        model(ids(), past_key_values=cache)
    for layer, weights in zip(cache.layers, received, strict=True):
        score = weights.mean(dim=1).sum(dim=1)[0]
        best = score[:26].topk(12).indices.tolist()
        assert kept(layer) == [sorted([*best, *range(26, 30)])]


@torch.no_grad()
@pytest.mark.parametrize("spec", ["keep_all", "h2o:20,recent=4", *POLICIES[:3], "h2o:10+int8"])
def test_padded_rows_equal_rows_alone(model, spec):
    prompt, pads = ids(3, 24), (12, 1, 0)
    mask = torch.ones_like(prompt)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    options = {"max_new_tokens": 5, "do_sample": False}
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, spec)
        text = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        assert cache.seen.tolist() == [28 - count for count in pads]
        for row, count in enumerate(pads):
            alone = kvkeep.Cache(model, spec)
            own = model.generate(prompt[row : row + 1, count:], past_key_values=alone, **options)
            assert own[0].equal(text[row, count:])
            assert [kept(x)[row] for x in cache.layers] == [kept(x)[0] for x in alone.layers]
        if spec in ("keep_all", "h2o:20,recent=4"):
            assert len(cache.layers[0].slots.segments()) > 1, "rows were not parted"


@torch.no_grad()
@pytest.mark.parametrize("spec", ["keep_all+int8", "keep_all+kivi:4,together=4,sinks=2"])
def test_codes(model, spec):
    """As the unattached model, which is given all decoded latents."""
    attached, plain = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec)
    for part in ids(2).split(CHUNKS, dim=1):
        expected = model(part, past_key_values=plain).logits
        with kvkeep.attach(model):
            found = model(part, past_key_values=attached).logits
        # The kernel of 8-bit codes rounds the weights of slots to 8 bits too.
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=2e-3)
    exact = kvkeep.Cache(model, spec.partition("+")[0])
    assert not model(ids(2), past_key_values=exact).logits[:, -1:].allclose(found, atol=1e-6)


def test_saved_forked_and_rewound(tmp_path, model):
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, "window:8,sinks=2+int8")
        model(ids(), past_key_values=cache)
        cache.save(tmp_path / "cache")
        fork = cache.freeze().fork()
        more = ids(1, 6, seed=4)
        expected = model(more, past_key_values=cache).logits
        for other in (kvkeep.load(tmp_path / "cache", model), fork):
            torch.testing.assert_close(model(more, past_key_values=other).logits, expected)
        whole = kvkeep.Cache(model)
        expected = model(ids(), past_key_values=whole).logits
        whole.rewind(20)
        found = model(ids()[:, 20:], past_key_values=whole).logits
        torch.testing.assert_close(found, expected[:, 20:], **NEAR)


@torch.no_grad()
def test_weights_beams_and_batches(model):
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = eager(ids(2), output_attentions=True, use_cache=False).attentions
    beams = model.generate(ids(2), num_beams=3, **options)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        found = model(ids(2), output_attentions=True, past_key_values=cache).attentions
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, atol=5e-6, rtol=1e-4)
        assert model.generate(ids(2), num_beams=3, **options).equal(beams)
        padded = torch.ones_like(ids(2))
        padded[0, :20] = 0  # rows that would be parted, but for the weights of all columns
        cache = kvkeep.Cache(model)
        given = {"attention_mask": padded, "past_key_values": cache}
        found = model(ids(2), output_attentions=True, **given).attentions
        assert found[0].shape[-1] == cache.layers[0].length == 30
        assert len(cache.layers[0].slots.segments()) == 1
        prompts = [ids(1, n, seed=n)[0] for n in (5, 20)]
        for spec in ("keep_all", "h2o:10"):
            several = generate_many(model, prompts, SamplingParams(5), spec=spec, progress=False)
            for prompt, (answer,) in zip(prompts, several, strict=True):
                alone = kvkeep.Cache(model, spec)
                text = model.generate(prompt[None], past_key_values=alone, **options)
                assert answer.tokens == text[0, len(prompt) :].tolist()


@torch.no_grad()
def test_a_mask_that_was_moved_to_a_layers_device_is_recognised_and_no_other(model):
    """Such a copy lacks what the mask function attached to the mask."""
    expected = model(ids(), use_cache=False).logits
    changes = []

    def changed(module, args, kwargs):
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].clone() + changes[-1]}

    hooks = [
        layer.self_attn.register_forward_pre_hook(changed, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        with kvkeep.attach(model):
            changes.append(0)
            found = model(ids(), past_key_values=kvkeep.Cache(model)).logits
            torch.testing.assert_close(found, expected, **NEAR)
            for other in (1, 0.0):
                changes.append(other)
                with pytest.raises((UnsupportedError, StateError)):
                    model(ids(), past_key_values=kvkeep.Cache(model))
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_an_interrupted_step_is_noticed(model):
    def stop(*_):
        raise InterruptedError

    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        model(ids(1, 5), past_key_values=cache)
        last = model.model.layers[-1].self_attn
        hook = last.kv_b_proj.register_forward_pre_hook(stop)
        with pytest.raises(InterruptedError):
            model(ids(1, 2), past_key_values=cache)
        hook.remove()
        with pytest.raises(StateError, match="was interrupted"):
            model(ids(1, 2), past_key_values=cache)
        cache.rewind(5)
        found = model(ids(1, 2), past_key_values=cache).logits
    expected = model(torch.cat([ids(1, 5), ids(1, 2)], dim=1), use_cache=False).logits[:, 5:]
    torch.testing.assert_close(found, expected, **NEAR)


def test_a_scorer_of_keys_of_heads_is_refused(tmp_path, model):
    path = tiny_scorer.write(tmp_path / "a.scorer", model)
    with pytest.raises(SpecError, match="policy kvzap scores a head's keys"):
        kvkeep.Cache(model, f"kvzap:25%,scorer={path}")
    with pytest.raises(UnsupportedError, match="build the cache from the model"):
        kvkeep.Cache(model.config, "expected_attention:10")


def test_what_a_latent_cannot_do_is_refused_with_the_reason(model):
    with pytest.raises(SpecError, match=r"both have one codec; use int4$"):
        kvkeep.Cache(model, "keep_all+int8/int4")
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, "keep_all@fixed:64")
        four = torch.zeros(1, 1, 5, 5)
        with pytest.raises(UnsupportedError, match="four axes"):
            model(ids(1, 5), attention_mask=four, past_key_values=cache)
        cache.reset()
        model(ids(1, 5), past_key_values=cache)
    with pytest.raises(StateError, match="while it was attached"), torch.no_grad():
        model(ids(1, 1), past_key_values=cache)
    evicting = kvkeep.Cache(model, "h2o:10")
    with pytest.raises(UnsupportedError, match="attach"), torch.no_grad():
        model(ids(), past_key_values=evicting)


@torch.no_grad()
def test_a_slot_holds_the_latent_once(model):
    config = model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        model(ids(), past_key_values=cache)
    position = 4
    assert cache.live_bytes == len(cache.layers) * 30 * (4 * width + position)
    assert cache.live_bytes == kvkeep.Cache(model).bytes_for(30)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts pages in memory")
def test_latents_take_little_more_memory_than_their_elements():
    """A layer of the shape of DeepSeek-V3, whose storage grows with chunks and with single steps:
    all pages of its buffers that are in memory."""
    config = DeepseekV3Config(num_hidden_layers=1, dtype="bfloat16")
    cache = kvkeep.Cache(config)
    (layer,) = cache.layers
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert width == 576
    for n in (900, *[1] * 30, 1300, *[1] * 30):
        k = torch.randn(1, 1, n, width, dtype=torch.bfloat16)
        layer.extend(k, k[..., : config.kv_lora_rank])
        layer.settle()
        if layer.fed in (930, 2260):
            held = in_core(buffers(cache)) / k.element_size()
            assert layer.fed * width < held <= 1.15 * layer.fed * width


@torch.no_grad()
def test_projections_are_those_of_the_module_at_the_time(model):
    """Weights that change, an adapter, and a layer of another class."""
    model = deepcopy(model)
    with kvkeep.attach(model):

        def follows():
            expected = model(ids(), use_cache=False).logits
            cache = kvkeep.Cache(model)
            parts = [model(x, past_key_values=cache).logits for x in ids().split([20, 9, 1], 1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, **NEAR)
            return expected

        before = follows()
        own = model.model.layers[0].self_attn
        own.kv_b_proj.weight.mul_(1.5)
        changed = follows()
        assert not changed.allclose(before, atol=1e-3)
        half = torch.nn.Linear(own.kv_lora_rank, 4, bias=False)
        plain = own.kv_b_proj
        own.kv_b_proj = torch.nn.Sequential(half, torch.nn.Linear(4, len(plain.weight), bias=False))
        assert not follows().allclose(changed, atol=1e-3)
        own.kv_b_proj = plain
        hook = plain.register_forward_hook(lambda module, args, out: 2 * out)
        assert not follows().allclose(changed, atol=1e-3)
        hook.remove()


@pytest.mark.parametrize("slow", [False, True])
def test_projections_where_torch_has_no_fast_product(slow, monkeypatch):
    """They are computed in float32, with results of the model's dtype."""
    own, dtypes = torch.bmm, []

    def watched(x, weight):
        dtypes.append(x.dtype)
        return own(x, weight)

    monkeypatch.setattr(latent, "is_slow", lambda dtype: slow)
    monkeypatch.setattr(torch, "bmm", watched)
    x = torch.randn(4, 2, 3, 8).bfloat16()
    weight = torch.randn(4, 8, 16).bfloat16()
    found = latent._by_head(x, weight)
    expected = torch.einsum("hbnd,hde->hbne", x.double(), weight.double())
    torch.testing.assert_close(found, expected.bfloat16(), atol=0.05, rtol=0.02)
    assert dtypes == [torch.float32 if slow else torch.bfloat16]
