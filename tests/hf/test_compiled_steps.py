"""attach(model, compile=True): one graph for the decode steps of all calls, and the same tokens."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.odd_attention import odd
from support.one_program import FAMILY, WIDE, shared_model
from support.tiny_models import tiny
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache

import kvkeep
from kvkeep import native_library
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.graph.custom_ops import Ticket
from kvkeep.graph.linear_op import route_linears
from kvkeep.graph.package import Package
from kvkeep.hf.steps import compiled as compiled_module
from kvkeep.hf.steps.compiled import CompiledSteps
from kvkeep.layer.decode.plan import FAILED
from kvkeep.layer.decode.ready import Ready
from kvkeep.layer.layer import LayerCache

pytestmark = pytest.mark.usefixtures("saved_graphs")
needs_library = pytest.mark.skipif(not native_library.available, reason=native_library.reason)


@pytest.fixture
def compiled(monkeypatch):
    """For each call of a model, whether it was a step for the graph."""
    found = []
    fits = CompiledSteps._fits

    def noted(self, given, cache):
        found.append(fits(self, given, cache))
        return found[-1]

    monkeypatch.setattr(CompiledSteps, "_fits", noted)
    return found


def pair(family=FAMILY):
    """A model attached without and with compile=True, with the same weights."""
    model = shared_model() if family == FAMILY else tiny(family, **WIDE)
    other = copy.deepcopy(model)
    kvkeep.attach(model, compile=False)
    kvkeep.attach(other, compile=True)
    return model, other


@pytest.mark.parametrize("family", [FAMILY, pytest.param("gemma3", marks=pytest.mark.slow)])
def test_one_graph_for_generate_and_for_loops(family, compiled):
    plain, model = pair(family)
    ids = torch.randint(3, 200, (1, 7))
    expected = plain.generate(ids, max_new_tokens=9, do_sample=False)
    assert model.generate(ids, max_new_tokens=9, do_sample=False).equal(expected)
    assert compiled == [False] + [True] * 8
    for mode in (torch.inference_mode, torch.no_grad):
        for spec in ("keep_all", "window:6,sinks=1", "h2o:6"):
            with mode():
                caches = [kvkeep.Cache(one, spec) for one in (plain, model)]
                for chunk in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:4], ids[:, :1]):
                    a, b = (
                        one(chunk, past_key_values=cache).logits
                        for one, cache in zip((plain, model), caches, strict=True)
                    )
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
            assert caches[0].stats() == caches[1].stats()
    assert compiled == ([False] + [True] * 8) + ([False, True, True, False, True]) * 6
    assert counters["stats"]["unique_graphs"] <= 1  # none, if another test compiled it


@needs_library
@pytest.mark.slow
def test_a_model_that_counts_positions_by_itself(compiled):
    plain, model = pair("opt")
    ids = torch.randint(3, 200, (1, 7))
    with torch.no_grad():
        caches = [kvkeep.Cache(one) for one in (plain, model)]
        for chunk in (ids, ids[:, :1], ids[:, 1:2]):
            a, b = (
                one(chunk, past_key_values=cache).logits
                for one, cache in zip((plain, model), caches, strict=True)
            )
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert compiled == [False, True, True]


def test_layers_of_one_input_are_one_operation():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(256, 300), nn.Linear(256, 260, bias=False)
            self.out, self.small = nn.Linear(300, 256), nn.Linear(256, 8)

        def forward(self, x):
            heads = self.k(x).view(*x.shape[:-1], 2, 130).transpose(-3, -2).flatten(-2)
            return self.out(self.q(x).relu()) + self.small(x).sum(), heads

    block, found = Block(), []

    def backend(graph, inputs):
        found.append(route_linears(graph, inputs))
        assert sum("linears" in str(node.target) for node in graph.graph.nodes) == 2
        return graph

    step = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for x in (torch.randn(1, 1, 256), torch.randn(4, 3, 256)):
            for a, b in zip(step(x), block(x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        block.q.weight.mul_(2)
        block.k.weight = nn.Parameter(torch.randn(260, 256))
        for a, b in zip(step(x), block(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert found == [4, 4]


def test_all_other_calls_go_to_the_models_own_forward(compiled):
    plain, model = pair()
    ids = torch.randint(3, 200, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **padded).equal(plain.generate(ids, **padded))
    with torch.no_grad():
        for options in (
            {"past_key_values": DynamicCache(config=model.config)},
            {"output_hidden_states": True},
        ):
            torch.testing.assert_close(
                model(ids[:, :1], **options).logits, plain(ids[:, :1], **options).logits
            )
        cache = kvkeep.Cache(model)
        model(ids, past_key_values=cache)
        assert model(ids[:, :1], past_key_values=cache, output_attentions=True).attentions
    model.train()
    model(ids[:, :1], labels=ids[:, :1]).loss.backward()
    assert model.model.embed_tokens.weight.grad is not None
    assert not any(compiled)


def test_what_torch_cannot_compile_is_refused_before_anything_is_fed(monkeypatch):
    _, model = pair()
    decoder = type(model.model)
    own = decoder.forward

    def broken(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return own(self, *args, **kwargs)

    with torch.no_grad():
        cache = kvkeep.Cache(model)
        model(torch.randint(3, 200, (1, 7)), past_key_values=cache)
        monkeypatch.setattr(decoder, "forward", broken)
        with pytest.raises(UnsupportedError, match="without compile=True"):
            model(torch.tensor([[5]]), past_key_values=cache)
        assert cache.fed == 7


def test_a_model_that_keeps_its_own_attention_is_refused():
    model = odd()
    with pytest.raises(UnsupportedError, match="computes attention itself, because"):
        kvkeep.attach(model, compile=True)
    kvkeep.attach(model)


def test_weights_that_change_between_steps():
    plain, model = pair()
    ids = torch.randint(3, 200, (1, 7))
    with torch.no_grad():
        caches = [kvkeep.Cache(one) for one in (plain, model)]
        changes = (
            lambda one: None,
            lambda one: None,
            lambda one: one.lm_head.weight.mul_(-1),
            lambda one: one.model.layers[1].self_attn.q_norm.weight.fill_(3),  # few numbers
            lambda one: setattr(one.model.norm, "weight", nn.Parameter(torch.linspace(-1, 1, 192))),
            lambda one: setattr(one.lm_head.weight, "data", one.lm_head.weight.data * 2),
        )
        for chunk, change in zip((ids, *ids.split(1, dim=1)), (changes[0], *changes), strict=False):
            logits = []
            for one, cache in zip((plain, model), caches, strict=True):
                change(one)
                logits.append(one(chunk, past_key_values=cache).logits)
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # compiles twice; test_saved_steps.py has what a program depends on
def test_weights_that_change_their_type():
    plain, model = pair()
    ids = torch.randint(3, 200, (1, 7))
    with torch.no_grad():
        cache = kvkeep.Cache(model)
        for chunk in (ids, ids[:, :1]):
            model(chunk, past_key_values=cache)
        for one in (plain, model):
            one.to(torch.bfloat16)
        caches = [kvkeep.Cache(one) for one in (plain, model)]
        for chunk in (ids, ids[:, :1], ids[:, 1:2]):
            logits = [
                one(chunk, past_key_values=c).logits
                for one, c in zip((plain, model), caches, strict=True)
            ]
            torch.testing.assert_close(*logits, rtol=0.1, atol=0.1)


@pytest.fixture
def ran(monkeypatch):
    """For each run of a program, how many layers' steps were made in Python."""
    found = []
    run, step = Package.__call__, LayerCache.run

    def noted(self, *given):
        found.append(0)
        return run(self, *given)

    def by_python(self, *given):
        if found:
            found[-1] += 1
        return step(self, *given)

    monkeypatch.setattr(Package, "__call__", noted)
    monkeypatch.setattr(LayerCache, "run", by_python)
    return found


@needs_library
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_serves_all_caches(ran, rows):
    plain, model = pair()
    specs = ("keep_all", "window:5,sinks=1", "h2o:6", "keep_all+int8", "keep_all@concat")
    with torch.no_grad():
        ids = torch.randint(3, 200, (rows, 12))
        caches = [(kvkeep.Cache(plain, spec), kvkeep.Cache(model, spec)) for spec in specs]
        for one, other in caches:
            plain(ids[:, :6], past_key_values=one)
            model(ids[:, :6], past_key_values=other)
        for turn in range(20):  # past the sliding window, and the first reallocations
            chunk = ids[:, turn % 12, None]
            found, expected = [], []
            for one, other in caches:
                found.append(model(chunk, past_key_values=other).logits)
                expected.append(plain(chunk, past_key_values=one).logits)
            for a, b in zip(found, expected, strict=True):
                # Codes of int8 may round otherwise.
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
        assert all(one.stats() == other.stats() for one, other in caches)
    assert len(ran) == 20 * len(specs)


@needs_library
def test_a_prepared_step_needs_no_python(ran):
    _, model = pair()
    with torch.no_grad():
        cache = kvkeep.Cache(model, "h2o:6")
        model(torch.randint(3, 200, (1, 7)), past_key_values=cache)
        for _ in range(4):
            model(torch.tensor([[5]]), past_key_values=cache)
    assert ran == [2, 0, 0, 0]


@needs_library
def test_a_program_follows_the_number_of_threads_and_the_weights(ran):
    plain, model = pair()
    ids = torch.randint(3, 200, (1, 7))
    threads = torch.get_num_threads()
    caches = [kvkeep.Cache(one) for one in (plain, model)]
    with torch.no_grad():
        for turn, chunk in enumerate((ids, *[ids[:, :1]] * 9)):
            if turn == 4:
                torch.set_num_threads(threads % 2 + 1)
            if turn == 7:
                for one in (plain, model):
                    one.lm_head.weight.data = one.lm_head.weight.data * 2
            a, b = (
                one(chunk, past_key_values=cache).logits
                for one, cache in zip((plain, model), caches, strict=True)
            )
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    torch.set_num_threads(threads)
    assert len(ran) == 9


@pytest.fixture
def stepped():
    """A model with a compiled step, a cache for its next step, and that step's logits."""
    _, model = pair()
    ids = torch.randint(3, 200, (1, 7))
    with torch.no_grad():
        cache = kvkeep.Cache(model)
        for chunk in (ids, ids[:, :1], ids[:, :1], ids[:, :1]):
            last = model(chunk, past_key_values=cache).logits
        cache.crop(-1)
        yield model, cache, ids[:, :1], last


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
def test_a_step_that_fails_within_a_program_leaves_a_cache_that_can_be_rewound(
    stepped, monkeypatch, error
):
    model, cache, token, last = stepped

    def fails(*given):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "prepare", lambda: None)
        patch.setattr(cache.layers[1], "run", fails)
        with pytest.raises(type(error)):
            model(token, past_key_values=cache)
    assert [layer.fed for layer in cache.layers] == [10, 9]
    with pytest.raises(StateError, match="rewind"):
        model(token, past_key_values=cache)
    cache.rewind(9)
    for _ in range(2):  # other steps are as before
        assert model(token, past_key_values=cache).logits.equal(last)
        cache.crop(-1)


@needs_library
def test_no_scratch_memory_for_a_prepared_step(stepped, monkeypatch):
    model, cache, token, last = stepped

    class Failing:
        def run(self, given):
            raise RuntimeError("aoti_torch_cpu_step(...) API call failed")

    program = model.forward._steps[1, 1]._program
    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "result", FAILED)
        patch.setattr(program, "_program", Failing())
        with pytest.raises(MemoryError, match="scratch"):
            model(token, past_key_values=cache)
    assert {layer.fed for layer in cache.layers} == {9}
    assert model(token, past_key_values=cache).logits.equal(last)


@needs_library
def test_a_program_with_inputs_that_a_prepared_step_does_not_take(stepped, monkeypatch):
    model, cache, token, last = stepped
    kind = Ready.__init__

    def other(self, plan):
        kind(self, plan)
        self.kind = bytes(len(self.kind))

    monkeypatch.setattr(Ready, "__init__", other)
    torch.testing.assert_close(model(token, past_key_values=cache).logits, last)
    assert {layer.fed for layer in cache.layers} == {10}


def test_the_error_of_a_kernel_is_raised(stepped, monkeypatch):
    model, cache, token, last = stepped
    monkeypatch.setattr(compiled_module, "check_fed", lambda *given: None)
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(token * 0 + 200, past_key_values=cache)
    assert model(token, past_key_values=cache).logits.equal(last)


def test_threads_with_caches_of_their_own_share_a_program():
    _, model = pair()
    prompts = [torch.randint(3, 200, (1, 5 + i)) for i in range(4)]

    def answer(ids):
        return model.generate(ids, max_new_tokens=12, do_sample=False)

    alone = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, prompts))
    assert all(a.equal(b) for a, b in zip(alone, together, strict=True))


def test_detached_and_copied():
    _, model = pair()
    other = copy.deepcopy(model)
    assert other.forward.model is other
    kvkeep.detach(model)
    assert "forward" not in model.__dict__


def test_a_graph_has_no_gradients():
    layer = kvkeep.Cache(tiny("llama"), "keep_all@concat")
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    inputs = (q.requires_grad_(), k, v, torch.zeros(1, 1, dtype=torch.int32), 1.0, None, None)
    with pytest.raises(StateError, match="no gradients"):
        torch.ops.kvkeep.step(layer._traced[0].number, *inputs)


_LOGITS = """
import torch, kvkeep
from support.tiny_models import tiny
model = tiny("llama", hidden_size=192, intermediate_size=256, vocab_size=200, num_hidden_layers=1)
ids, found = torch.arange(3, 10)[None], []
with torch.no_grad():
    for compile in (False, True):
        kvkeep.attach(model, compile=compile)
        cache = kvkeep.Cache(model)
        model(ids, past_key_values=cache)
        found.append(model(ids[:, :1], past_key_values=cache).logits)
        kvkeep.detach(model)
torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
def test_torchs_cache_gives_no_code_for_another_width_of_vectors(tmp_path):
    for capability in (torch.backends.cpu.get_cpu_capability().lower(), "avx2", "default"):
        settings = {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        run = [sys.executable, "-c", _LOGITS]
        subprocess.run(run, check=True, cwd="tests", env=os.environ | settings)
