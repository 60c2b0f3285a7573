"""An attached GPT compiles to one graph, which serves every cache."""

from __future__ import annotations

import pytest
import torch
from litgpt.generate.base import generate
from support.tiny_litgpt import tiny_gpt
from torch._dynamo.testing import CompileCounterWithBackend

import kvkeep
from kvkeep.errors import ShapeError
from kvkeep.host.hooks import foreign_hooks
from kvkeep.store import PrefixStore

IDS = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(gpt, backend="eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(gpt, fullgraph=True, backend=counter), counter


SLOW_FAMILIES = ["gemma3", "pythia", "deepseek"]
SLOW_SPECS = ["h2o:8+int8", "window:6,sinks=2@fixed"]


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW_FAMILIES)]
)
def test_one_graph(family):
    gpt = tiny_gpt(family, n_layer=1 if family == "llama" else 2)
    with kvkeep.attach(gpt):
        for given in ((IDS,), (IDS, torch.arange(20)), (IDS, torch.arange(20).expand(2, -1))):
            found = torch._dynamo.explain(gpt)(*given)
            assert (found.graph_count, found.graph_break_count) == (1, 0)
            torch._dynamo.reset()


@pytest.mark.parametrize(
    "spec",  # test_litgpts_own_generate evicts in a graph
    ["keep_all", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW_SPECS)],
)
def test_it_computes_what_the_model_does(spec):
    gpt = tiny_gpt(n_layer=1)

    def run(step):
        found = [step(IDS[:1, :12], torch.arange(12))]
        for i in range(12, 16):
            found.append(step(IDS[:1, i : i + 1], torch.tensor([i])))
        if spec == "keep_all":
            found.append(step(IDS[:1, 16:17], torch.tensor([13])))  # takes three tokens back
        found.append(step(IDS[1:, :12], torch.arange(12)))  # begins a new cache
        return torch.cat(found, dim=1)

    with kvkeep.attach(gpt, spec) as attachment:
        expected, kept = run(gpt), attachment.cache.length
        step, counter = compiled(gpt, "aot_eager")
        torch.testing.assert_close(run(step), expected)
        assert attachment.cache.length == kept
        assert counter.frame_count == 2  # of 12 tokens, and of one


def test_rows_of_different_lengths():
    gpt = tiny_gpt(n_layer=1)
    place = torch.stack([torch.arange(20), torch.arange(20) - 5]).clamp(min=-1)
    with kvkeep.attach(gpt):
        expected = gpt(IDS, place)
        step, _ = compiled(gpt)
        torch.testing.assert_close(step(IDS, place)[1, 5:], expected[1, 5:])
        torch.testing.assert_close(step(IDS, place)[0], expected[0])


def test_a_graph_serves_other_caches():
    gpt, store = tiny_gpt(n_layer=1), PrefixStore()
    with kvkeep.attach(gpt) as attachment:
        step, counter = compiled(gpt)
        step(IDS[:1, :1], torch.tensor([0]))
        for row in IDS:
            attachment.cache = store.read(gpt, row[:-1]).cache
            found = step(row[None, -1:], torch.tensor([19]))[0, -1]
            torch.testing.assert_close(found, gpt(row[None])[0, -1], atol=1e-5, rtol=1e-4)
        assert counter.frame_count == 1
        attachment.cache = store.read(gpt, IDS[0]).cache
        with pytest.raises(ShapeError, match="does not follow the 20 columns"):
            step(IDS[:1, :2], torch.tensor([20, 29]))


def test_litgpts_own_generate():
    gpt = tiny_gpt(n_layer=1)
    with kvkeep.attach(gpt, "h2o:8"):
        options = {"temperature": 0.0, "top_p": 0.0}
        expected = generate(gpt, IDS[0], 30, **options)
        step, _ = compiled(gpt)
        assert generate(step, IDS[0], 30, **options).equal(expected)


def test_detach_gives_back_a_forward_of_ones_own():
    gpt = tiny_gpt()
    own = gpt.forward
    gpt.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2
    mine = gpt.__dict__["forward"]
    expected = gpt(IDS)
    with kvkeep.attach(gpt):
        torch.testing.assert_close(gpt(IDS, torch.arange(20)), expected, atol=1e-5, rtol=1e-4)
        assert list(foreign_hooks(gpt)) == ["GPT"]
    assert gpt.__dict__["forward"] is mine
    del gpt.forward
    with kvkeep.attach(gpt):
        assert foreign_hooks(gpt) == {}
    assert "forward" not in gpt.__dict__
