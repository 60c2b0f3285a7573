"""Models whose tokens an index chooses for each query: DeepSeek V3.2, GLM-5, Qwen 4, MiniMax M3 and
others."""

from __future__ import annotations

import pytest
import torch
from support.autograd_gradients import error, gradients, in_float64, ordinary
from support.packed_logits import packed_logits
from support.random_ids import ids
from support.sweep_configs import few_layers, model_of
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.hf.kinds import layer_kinds
from kvkeep.layer.layer import LayerCache
from kvkeep.train import backward

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = {"atol": 1e-4, "rtol": 2e-4}


@pytest.fixture(
    scope="module", params=["deepseek_v32", "hy_v4", "qwen4_exp_text", "minimax_m3_vl_text"]
)
def model(request):
    """4 of 24 tokens are chosen; by qwen4_exp_text, 4 blocks of 2, and by minimax_m3_vl_text 2
    blocks of 4 for each kv head. hy_v4's layers share the choice of one of them."""
    return few_layers(request.param)


def choose(model, tokens):
    """Let indexes choose so many tokens; by minimax_m3_vl_text, twice as many, because tokens that
    are kept leave blocks incomplete."""
    for module in model.modules():
        for name, size in {"index_topk": 1, "block_topk": 2, "topk_blocks": 2.4}.items():
            if hasattr(module, name):
                setattr(module, name, int(tokens / size))
                module.token_budget = tokens  # of qwen4_exp_text


def test_a_query_attends_to_the_tokens_that_the_index_chooses(model):
    text = ids(1, 24)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model)
            parts = text.split([9, 1, 1, 13], dim=1)
            found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
            fork = cache.freeze().fork()
            again = model(text[:, :3], past_key_values=fork).logits
            torch.testing.assert_close(again, model(text[:, :3], past_key_values=cache).logits)
    torch.testing.assert_close(found, expected, **NEAR)
    own = 16 + 8 if hasattr(model.config, "kv_lora_rank") else 8
    assert {layer.history.geometry.key_width for layer in cache.layers} >= {own + 8}
    assert cache.live_bytes == kvkeep.Cache(model).bytes_for(cache.fed)


def test_other_caches_and_forwards_without_one_choose_too(model):
    text = ids(1, 24)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        with kvkeep.attach(model):
            plain = model(text, use_cache=False).logits
            other = DynamicCache(config=model.config)
            parts = [model(part, past_key_values=other).logits for part in text.split(12, dim=1)]
    torch.testing.assert_close(plain, expected, **NEAR)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **NEAR)


def test_sequences_of_a_packed_forward_choose_among_their_own(model):
    texts = [ids(1, n, seed=n)[0] for n in (5, 2, 17)]
    with torch.no_grad(), kvkeep.attach(model):
        expected = torch.cat([model(x[None], use_cache=False).logits[:, -1] for x in texts])
        found = packed_logits(model, texts)
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.parametrize(
    "spec", ["h2o:11", pytest.param("window:9,sinks=2", marks=pytest.mark.slow)]
)
def test_budgets_evict_the_keys_of_the_index_too(model, spec):
    """If no more tokens are kept than are chosen, the same are seen with any index."""
    found = []
    text = ids(2, 24)
    with torch.no_grad(), kvkeep.attach(model):
        for columns in (12, 24):
            choose(model, columns)
            cache = kvkeep.Cache(model, spec)
            found = [*found, *(model(x, past_key_values=cache).logits for x in text.split(1, 1))]
            assert cache.length <= 12
            assert cache.live_bytes == cache.bytes_for(24, 2)
    torch.testing.assert_close(found[:24], found[24:], **NEAR)


def test_what_it_lacks_is_said_before_anything_runs(model):
    with pytest.raises(SpecError, match="leave out step"):
        kvkeep.attach(model, "h2o:8,step=2")
    with pytest.raises(UnsupportedError, match=r"whose tokens an index chooses.*compile=True"):
        kvkeep.attach(model, compile=True)
    if model.config.model_type == "qwen4_exp_text":
        return  # unattached, its decoder looks for members that layers of kvkeep's caches lack
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"call kvkeep.attach"):
        model(ids(1, 4), past_key_values=kvkeep.Cache(model))


def test_each_head_chooses_among_the_tokens_that_it_holds(monkeypatch):
    """h2o keeps other tokens in one kv head than in the other. By the index, 4 blocks of 2 are
    chosen, and a last token without a block."""
    model, apart, run = model_of("qwen4_exp_text"), [], LayerCache.run

    def checked(layer, inputs, attend=None):
        held = layer.held()
        if held is not None and inputs.chosen is not None:
            new = inputs.position.reshape(1, 1, -1).expand(*held.position.shape[:2], -1)
            own = torch.cat([held.position, new], dim=2)
            for head in range(own.shape[1]):
                chosen = inputs.chosen[0, head % inputs.chosen.shape[1], 0]
                chosen = set(chosen[chosen >= 0].tolist())
                assert chosen <= set(own[0, head].tolist())
                assert len(chosen) == 8 + own.shape[2] % 2
            apart.append(inputs.chosen.shape[1] > 1)
        return run(layer, inputs, attend)

    monkeypatch.setattr(LayerCache, "run", checked)
    with torch.no_grad(), kvkeep.attach(model, "h2o:12"):
        cache = kvkeep.Cache(model, "h2o:12")
        for token in ids(1, 24).split(1, dim=1):
            model(token, past_key_values=cache)
    assert any(apart)
    assert not apart[0]


def test_heads_of_different_lengths_see_what_was_chosen_for_each(monkeypatch):
    """adakv stores each head in a part of its own. For each head, all its tokens are chosen, of
    which other heads lack some."""
    model, text, run = few_layers("llama"), ids(1, 24), LayerCache.run

    def told(layer, inputs, attend=None):
        place = inputs.position.reshape(1, 1, -1).expand(1, inputs.k.shape[1], -1)
        if layer.length:
            place = torch.cat([layer.held().position, place], dim=2)
        return run(layer, inputs._replace(chosen=place[:, :, None].to(torch.int32)), attend)

    with torch.no_grad(), kvkeep.attach(model):
        cache = kvkeep.Cache(model, "adakv(h2o:11)")
        expected = [model(x, past_key_values=cache).logits for x in text.split(1, dim=1)]
        lengths = (cache.layers[0].held().position >= 0).sum(dim=2)[0].tolist()
        monkeypatch.setattr(LayerCache, "run", told)
        cache = kvkeep.Cache(model, "adakv(h2o:11)")
        found = [model(x, past_key_values=cache).logits for x in text.split(1, dim=1)]
    assert len(set(lengths)) > 1
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.parametrize("kind", ["qwen4_exp_text", "minimax_m3_vl_text"])
def test_rows_padded_on_the_left_choose_as_if_alone(kind):
    model, pads = few_layers(kind), 5
    text = ids(2, 24)
    mask = torch.ones_like(text)
    mask[0, :pads] = 0
    with torch.no_grad():
        alone = model(text[:1, pads:], use_cache=False).logits
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model)
            found = [
                model(
                    text[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, start:stop],
                    past_key_values=cache,
                ).logits
                for start, stop in ((0, 9), (9, 10), (10, 24))
            ]
    torch.testing.assert_close(torch.cat(found, dim=1)[:1, pads:], alone, **NEAR)


def test_positions_of_a_caller_move_the_index_too():
    """Only differences of positions count, so a text from position 7 on has the same logits."""
    model, text = few_layers("qwen4_exp_text"), ids(1, 24)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        with kvkeep.attach(model):
            cache, place = kvkeep.Cache(model), torch.arange(7, 31)[None]
            pairs = zip(text.split(12, dim=1), place.split(12, dim=1), strict=True)
            found = [model(x, position_ids=at, past_key_values=cache).logits for x, at in pairs]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **NEAR)


def test_tokens_of_an_image_that_share_positions_are_refused_by_a_compressed_index():
    model = few_layers("qwen4_exp_text")
    place = torch.arange(4).expand(4, 1, -1).clone()
    place[-1, 0, 2] = 1
    with torch.no_grad(), kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        with pytest.raises(UnsupportedError, match=r"with images.*give text only"):
            model(ids(1, 4), position_ids=place, past_key_values=cache)
        assert cache.fed == 0


@pytest.mark.parametrize("kind", ["qwen4_exp_text", "minimax_m3_vl_text"])
def test_gradients_do_not_pass_through_a_choice(kind):
    """qwen4_exp_text also carries token ids from chunk to chunk, which have no gradient."""
    model, text = few_layers(kind).double(), ids(1, 24)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's own takes no float64
    with in_float64(model):
        backward(model, text, text, cache="keep_all", chunk=5)
        found = gradients(model)
        ordinary(model, text, text).backward()
    assert error(found, gradients(model)) < 1e-4


def test_an_index_with_other_heads_than_the_keys_is_refused():
    config = few_layers("minimax_m3_vl_text").config
    config.index_n_heads = 4
    with pytest.raises(UnsupportedError, match="its index has 4 heads for 2 kv heads"):
        layer_kinds(config)
