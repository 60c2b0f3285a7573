"""Packed steps of one token of each sequence, in a compiled graph."""

from __future__ import annotations

import copy
import gc
from weakref import ref

import pytest
import torch
from support.random_ids import ids
from support.sweep_configs import model_of
from torch._dynamo.utils import counters

import kvkeep
from kvkeep import native_library
from kvkeep.generate import Batch, SamplingParams
from kvkeep.graph.package import Package
from kvkeep.hf.attach import compiled_steps
from kvkeep.hf.forward import packed
from kvkeep.hf.forward.packed import RowsOf
from kvkeep.hf.steps import compiled
from kvkeep.host import Piece, host_of
from kvkeep.layer.packed import PackedLayer, ReadyTogether

pytestmark = pytest.mark.usefixtures("saved_graphs")

ROWS = 6  # more than sequences: the others are spare
SPECS = ["keep_all@fixed:64", "adakv(h2o:9)", "window:6", "keep_all+int8", "h2o:9"]


@pytest.fixture(autouse=True)
def _one_program(monkeypatch):
    """For all batches, because compiling one takes ten seconds."""
    for module in (packed, compiled):
        monkeypatch.setattr(module, "NUMBERS", (ROWS,))


def hosts(kind="lfm2"):
    """The same model, of a recurrent layer and one of attention, attached without and with
    compile=True."""
    model = model_of(kind, 2)
    other = copy.deepcopy(model)
    kvkeep.attach(model, compile=False)
    kvkeep.attach(other, compile=True)
    return host_of(model), host_of(other)


class Both:
    """Caches that two hosts are fed alike."""

    def __init__(self, hosts, specs):
        self.hosts = hosts
        self.caches = [[host.new_cache(spec) for spec in specs] for host in hosts]

    def feed(self, counts):
        """Feed so many tokens to each sequence; compare the logits and the slots."""
        ids = {i: torch.randint(3, 60, (int(n),)) for i, n in enumerate(counts) if n}
        found = [
            host.forward_packed([Piece(x, caches[i]) for i, x in ids.items()])
            for host, caches in zip(self.hosts, self.caches, strict=True)
        ]
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        for one, other in zip(*self.caches, strict=True):
            assert one.stats() == other.stats()


@pytest.fixture
def noted(monkeypatch):
    """How often a program has run; how often a layer's step in it was made in Python, and how often
    it was prepared."""
    found = {"programs": 0, "python": 0, "prepared": 0}

    def counting(name, real):
        def counted(self, *given):
            found[name] += 1
            return real(self, *given)

        return counted

    for owner, method, name in (
        (Package, "__call__", "programs"),
        (RowsOf, "run", "python"),
        (ReadyTogether, "end", "prepared"),
    ):
        monkeypatch.setattr(owner, method, counting(name, getattr(owner, method)))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lfm2", pytest.param("llama", marks=pytest.mark.slow)])
def test_sequences_join_and_leave(noted, kind):
    torch.manual_seed(0)
    both = Both(hosts(kind), SPECS)
    both.feed([5, 9, 3, 12, 20])
    for step in range(24):
        # Sometimes one sequence waits, or reads a prompt's chunk.
        both.feed([1, 1, 1, 1, step % 5 > 0] if step % 7 else [1, 1, 4, 1, 1])
    assert noted["programs"] > 15
    assert noted["prepared"] > 15


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@torch.no_grad()
def test_steps_of_plain_caches_are_calls_of_the_library(noted):
    both = Both(hosts(), ["keep_all@fixed:64"] * 2)
    both.feed([5, 9])
    for _ in range(3):  # compile, and describe the layers' steps
        both.feed([1, 1])
    noted.update(dict.fromkeys(noted, 0))
    for _ in range(4):
        both.feed([1, 1])
    layers = len(both.caches[0][0].layers)
    assert noted == {"programs": 4, "python": 0, "prepared": 4 * layers}


@pytest.mark.skipif(not native_library.available, reason=native_library.reason)
@torch.no_grad()
def test_inputs_that_prepared_steps_do_not_take(monkeypatch, noted):
    both = Both(hosts(), ["keep_all", "h2o:30"])
    both.feed([5, 9])
    for _ in range(2):
        both.feed([1, 1])
    prepared = PackedLayer.prepared

    def other(self):
        step = prepared(self)
        step.kind = bytes(len(step.kind))
        return step

    monkeypatch.setattr(PackedLayer, "prepared", other)
    noted["python"] = 0
    both.feed([1, 1])
    assert noted["python"] == len(both.caches[0][0].layers)


@torch.no_grad()
def test_a_step_keeps_no_sequence():
    both = Both(hosts(), ["keep_all", "h2o:30"])
    both.feed([5, 9])
    for _ in range(2):
        both.feed([1, 1])
    left = [ref(layer) for cache in both.caches[1] for layer in cache.layers]
    both.caches = []
    gc.collect()
    assert not any(layer() for layer in left)


@torch.no_grad()
def test_a_failure_within_a_graph_is_taken_back(monkeypatch):
    both = Both(hosts(), ["keep_all", "h2o:30"])
    both.feed([5, 9])
    for _ in range(3):
        both.feed([1, 1])
    before = [cache.fed for cache in both.caches[1]]

    def fails(*given):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(RowsOf, "run", fails)
        patch.setattr(RowsOf, "prepare", lambda *given: None)
        with pytest.raises(MemoryError):
            both.hosts[1].forward_packed(
                [Piece(torch.tensor([7]), cache) for cache in both.caches[1]]
            )
    assert [cache.fed for cache in both.caches[1]] == before
    both.feed([1, 1])


@torch.no_grad()
def test_warmed_steps_compile_nothing(noted):
    both = Both(hosts(), ["keep_all+int8", "window:6"])
    both.hosts[1].warm("keep_all", 2)
    steps = compiled_steps(both.hosts[1].model)._steps
    assert set(steps) == {(2, ROWS)}
    assert None not in steps.values()
    graphs, noted["programs"] = counters["stats"]["unique_graphs"], 0
    both.feed([5, 9])
    both.feed([1, 1])
    both.feed([1, 0])
    assert counters["stats"]["unique_graphs"] == graphs
    assert noted["programs"] == 2


@torch.no_grad()
def test_answers_of_a_batch(noted):
    """Drafts run in no program, because their states must return to copies."""
    models = [host.model for host in hosts()]
    texts = [ids(1, n)[0] for n in (9, 5)]
    found = []
    for model in models:
        answers = Batch(model)
        added = [answers.add(x, SamplingParams(max_new_tokens=6))[0] for x in texts]
        list(answers)
        found.append([answer.tokens for answer in added])
    assert found[0] == found[1]
    assert noted["programs"] == 5
    options = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 2}
    text = torch.cat([texts[0], texts[0]])[None]
    plain, compiled = (model.generate(text, **options) for model in models)
    assert compiled.equal(plain)
    assert noted["programs"] == 5
