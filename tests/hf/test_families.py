"""Every supported family: cached text equals uncached text. Every other one is refused by name."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from support.tiny_models import FAMILIES, tiny
from transformers import DynamicCache

import kvkeep
from kvkeep.errors import UnsupportedError

PROMPT, NEW = 20, 5
PADS = (6, 1, 0)


def batch(side: str) -> dict[str, torch.Tensor]:
    """Three rows of different lengths, padded on one side."""
    ids = torch.randint(2, 96, (len(PADS), PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        columns = slice(0, pads) if side == "left" else slice(PROMPT - pads, PROMPT)
        mask[row, columns] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny(request.param)


def prompts():
    left = batch("left")
    single = {name: x[2:] for name, x in left.items()}
    return {"single": single, "left": left, "right": batch("right")}


@pytest.fixture(scope="module")
def uncached(model):
    return {name: generate(model, x, use_cache=False) for name, x in prompts().items()}


def test_text_of_the_oracle_varies(uncached):
    assert uncached["single"][0, PROMPT:].unique().numel() >= 2


def skip_if_windowed(model, padding):
    """transformers counts padding columns as distance within a sliding window; kvkeep does not."""
    if padding == "right" and any(kvkeep.Cache(model).is_sliding):
        pytest.skip("see test_right_padded_rows_equal_rows_alone")


@pytest.mark.parametrize(
    ("spec", "padding"),
    [
        ("keep_all@concat", "right"),
        ("window:100,sinks=2", "single"),
        pytest.param("keep_all", "left", marks=pytest.mark.slow),  # also below
        pytest.param("keep_all@fixed", "left", marks=pytest.mark.slow),
    ],
)
def test_attached(model, uncached, padding, spec):
    skip_if_windowed(model, padding)
    with kvkeep.attach(model) as attachment:
        layers = model.config.num_hidden_layers
        assert attachment.layers == layers - getattr(model.config, "num_kv_shared_layers", 0)
        assert attachment.attention == layers
        cache = kvkeep.Cache(model, spec)
        text = generate(model, prompts()[padding], past_key_values=cache)
    assert text.equal(uncached[padding])
    assert cache.fed == PROMPT + NEW - 1


@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(x, marks=pytest.mark.slow) for x in ("single", "right"))]
)
def test_attached_default_and_foreign_cache(model, uncached, padding):
    skip_if_windowed(model, padding)
    with kvkeep.attach(model):
        output = generate(model, prompts()[padding], return_dict_in_generate=True)
        foreign = DynamicCache(config=model.config)
        other = generate(model, prompts()[padding], past_key_values=foreign)
        none = generate(model, prompts()[padding], use_cache=False)
    cache = output.past_key_values
    assert isinstance(cache, kvkeep.Cache)
    for layer in cache.layers:  # a sliding one keeps its window only
        if layer.chunked:  # of the rows, the one that is farthest in its chunk
            assert layer.length == max(int(seen - 1) % layer.window + 1 for seen in cache.seen)
        else:
            assert layer.length == (cache.fed if layer.window is None else layer.window)
    assert output.sequences.equal(uncached[padding])
    assert other.equal(uncached[padding])
    assert none.equal(uncached[padding])


@torch.no_grad()
def test_right_padded_rows_go_on(model):
    """As without kvkeep; without windows, which count padding, as each row alone."""
    inputs = prompts()["right"]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = torch.randint(2, 96, (len(PADS), 5))
    lengths = mask.sum(dim=1, keepdim=True)
    going_on = {
        "attention_mask": torch.cat([mask, torch.ones_like(more)], dim=1),
        "position_ids": lengths + torch.arange(5),
    }

    def logits(cache):
        model(ids, attention_mask=mask, past_key_values=cache)
        return model(more, past_key_values=cache, **going_on).logits

    expected = logits(DynamicCache(config=model.config))
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model)
        found = logits(cache)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)
    assert cache.seen.tolist() == (lengths[:, 0] + 5).tolist()
    if any(layer.window for layer in cache.layers):
        return
    for row, length in enumerate(lengths[:, 0].tolist()):
        alone = torch.cat([ids[row, :length], more[row]])[None]
        expected = model(alone, use_cache=False).logits[0, -5:]
        torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("storage", "padding"),
    [
        ("fixed", "left"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("growing", "single"), ("concat", "right"))
        ),
    ],
)
def test_unattached(model, uncached, storage, padding):
    cache = kvkeep.Cache(model, f"keep_all@{storage}")
    if any(layer.chunked for layer in cache.layers):
        with pytest.raises(UnsupportedError, match="chunks begin where padding ends"):
            generate(model, prompts()[padding], past_key_values=cache)
        return
    assert generate(model, prompts()[padding], past_key_values=cache).equal(uncached[padding])


def test_logits(model):
    ids = prompts()["single"]["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with kvkeep.attach(model):
            cache = kvkeep.Cache(model)
            chunks = [model(c, past_key_values=cache).logits for c in ids.split([1, 7, 12], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=2e-5, rtol=2e-4)


REFUSED = {
    "t5": (tf.T5Config, tf.T5ForConditionalGeneration, "encoder-decoder"),
    "xlnet": (tf.XLNetConfig, tf.XLNetLMHeadModel, "AttentionInterface"),
    "deepseek_v4": (tf.DeepseekV4Config, tf.DeepseekV4ForCausalLM, "compressed_sparse"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_with_the_reason(family):
    config_class, model_class, reason = REFUSED[family]
    with torch.device("meta"):
        model = model_class(config_class())
    implementation, state = model.config._attn_implementation, set(model.__dict__)
    with pytest.raises(UnsupportedError, match=reason) as error:
        kvkeep.attach(model)
    assert family.split("_")[0] in str(error.value).lower()
    assert model.config._attn_implementation == implementation
    assert set(model.__dict__) == state
