"""Budgets that are a share of the tokens fed."""

import pytest
import torch

import kvkeep
from kvkeep import Cache
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.graph.device_step import require_fitting
from kvkeep.policy import Share
from kvkeep.spec import CacheSpec
from tests.support.tiny_models import tiny

SPECS = {
    "window": ("window:{},sinks=2{}", 2),
    "h2o": ("h2o:{}{}", 0),
    "snapkv": ("snapkv:{},window=4{}", 0),
    "adakv": ("adakv(h2o:{},recent=2{})", 0),
}


def fed(spec, chunks):
    """A layer that was fed chunks of these lengths, the same tokens for every spec."""
    torch.manual_seed(1)
    layer = CacheSpec.parse(spec).layer()
    q, k, v = torch.randn(2, 4, 64, 8), torch.randn(2, 2, 64, 8), torch.randn(2, 2, 64, 8)
    start = 0
    for n in chunks:
        part = slice(start, start + n)
        layer.step(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.4)
        start += n
    return layer


@pytest.mark.parametrize("name", SPECS)
def test_a_share_keeps_what_that_many_tokens_keep(name):
    text, sinks = SPECS[name]
    shared = fed(text.format("50%", ",least=4"), [64])
    fixed = fed(text.format(32 - sinks, ""), [64])
    assert torch.equal(shared.positions(), fixed.positions())
    assert shared.stats().kept == fixed.stats().kept == 0.5


@pytest.mark.parametrize("name", SPECS)
def test_the_budget_grows_with_the_tokens(name):
    spec = CacheSpec.parse(SPECS[name][0].format("25%", ",least=10"))
    torch.manual_seed(1)
    layer = spec.layer()
    for n in (8, 1, 1, 1, 13, 1, 6, 1, 1, 1, 30, 1, 1, 1, 60, 1, 1, 20):
        q, k, v = torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
        layer.step(q, k, v, scale=0.4)
        held = int((layer.positions() >= 0).sum())
        since = layer.fed % 32
        assert held == 2 * min(layer.fed, max(10, (layer.fed - since) // 4) + since)


def test_promised_bytes_count_the_share():
    model = tiny("llama")
    kvkeep.attach(model)
    cache = Cache(model, "h2o:25%,least=8+int8")
    ids = torch.randint(0, 90, (1, 61))
    promised = [cache.bytes_for(n) for n in (61, 65)]
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        assert cache.live_bytes == promised[0]
        for _ in range(4):
            model(ids[:, :1], past_key_values=cache)
    assert cache.live_bytes == promised[1]
    assert cache.stats().kept == pytest.approx((16 + 1) / 65)


def test_a_saved_share_goes_on(tmp_path):
    model = tiny("llama")
    kvkeep.attach(model)
    cache = Cache(model, "h2o:25%,least=8")
    ids = torch.randint(0, 90, (1, 61))
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        again = kvkeep.load(tmp_path / "cache.safetensors", model)
        for _ in range(8):
            one, other = (model(ids[:, :1], past_key_values=x).logits for x in (cache, again))
            assert torch.equal(one, other)
    assert again.length == cache.length == 64 // 4 + 5


def test_layers_of_a_pyramid_have_shares_of_their_own():
    policy = CacheSpec.parse("pyramid:4(h2o:40%)").policy
    shares = [policy.in_layer(i, 5).share for i in range(5)]
    assert sum(shares) == pytest.approx(2.0)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(0.1)
    assert CacheSpec.parse("pyramid(h2o:90%)").policy.in_layer(0, 5).share == 1


def test_layers_with_a_window_keep_their_window():
    for text in ("h2o:25%", "window:25%", "adakv(h2o:25%)"):
        assert CacheSpec.parse(text).policy.within(8) == CacheSpec.parse("window:8").policy


def test_text_and_errors():
    assert str(CacheSpec.parse("h2o:12.5%,least=9")) == "h2o:12.5%,least=9+plain@growing"
    assert CacheSpec.parse("window:25%").policy.size == Share(0.25)
    with pytest.raises(SpecError, match="a whole number or a percentage, such as 25%"):
        CacheSpec.parse("h2o:quarter")
    with pytest.raises(SpecError, match="least -1: a share keeps at least 1 slot; use least=64"):
        CacheSpec.parse("h2o:50%,least=-1")
    with pytest.raises(SpecError, match="least=64 if the budget is a share"):
        CacheSpec.parse("snapkv:25%,least=10")
    layer = CacheSpec.parse("h2o:50%@fixed:64").layer()
    x = torch.randn(1, 2, 8, 8)
    layer.step(x, x, x, scale=0.4)
    with pytest.raises(UnsupportedError, match="give policy h2o a number of tokens"):
        require_fitting(layer)


def test_a_batch_promises_the_most_that_a_share_takes():
    model = tiny("llama")
    with kvkeep.attach(model):
        batch = kvkeep.Batch(model, spec="h2o:25%,least=8")
        cache = Cache(model, "h2o:25%,least=8")
        most = 0
        for tokens in range(1, 200):
            most = max(most, cache.bytes_for(tokens))
            assert batch._intake._bytes_of(cache, tokens) >= most
