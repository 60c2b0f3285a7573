"""Models whose tokens an index chooses for each query: DeepSeek V3.2, GLM-5 and others."""

from __future__ import annotations

import pytest
import torch
from support.packed_logits import packed_logits
from support.random_ids import ids
from support.sweep_models import model_of
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import SpecError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = {"atol": 1e-4, "rtol": 2e-4}


@pytest.fixture(scope="module", params=["deepseek_v32", "hy_v4"])
def model(request):
    """hy_v4's layers share the choice of one of them; 4 of 24 tokens are chosen."""
    return model_of(request.param)


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
    assert {layer.history.geometry.key_width for layer in cache.layers} >= {16 + 8 + 8}
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


@pytest.mark.parametrize("spec", ["window:9,sinks=2", "h2o:11"])
def test_budgets_evict_the_keys_of_the_index_too(model, spec):
    """If no more tokens are kept than are chosen, the same are seen with any index."""
    found = []
    text = ids(2, 24)
    with torch.no_grad(), kvkeep.attach(model):
        for columns in (12, 24):
            for module in model.modules():
                if hasattr(module, "index_topk"):
                    module.index_topk = columns
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
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"call kvkeep.attach"):
        model(ids(1, 4), past_key_values=kvkeep.Cache(model))
