"""`generate()` on a GPU replays its steps. Here recorded operations stand in for a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.recorded_graph import RecordedGraph
from support.tiny_models import FAMILIES, UNGRAPHED, tiny
from transformers import StoppingCriteria

import kvkeep
from kvkeep import attention
from kvkeep.codec import groups
from kvkeep.errors import UnsupportedError
from kvkeep.hf import inputs
from kvkeep.hf.generation import replaying
from kvkeep.hf.steps.cuda_graph import Graphed
from kvkeep.policy import ranking


@pytest.fixture
def steps(monkeypatch):
    """How each step of a token ran: "eager" or "recorded" by `Graphed`, else "replayed"."""
    ran = []
    plain = tuple(b for b in attention.backends() if b.name in ("sdpa", "reference"))
    monkeypatch.setattr(attention, "_TABLE", tuple(replace(b, device=None) for b in plain))
    for module in (ranking, groups):  # operations of torch are recorded, the library's are not
        monkeypatch.setattr(module, "LIBRARY", None)
    monkeypatch.setattr(inputs, "check_tokens", lambda *_: None)  # looked at on the CPU only
    monkeypatch.setattr(replaying, "on_gpu", lambda _: True)
    run = Graphed._run

    def recorded(self):
        graph = self.__dict__.setdefault("_recorded", None)
        if self._steps < 2:
            ran.append("eager")
            return run(self)
        if graph is None:
            ran.append("recorded")
            with RecordedGraph() as graph:
                self._logits = run(self)
            self._recorded = graph
        else:
            ran.append("replayed")
            graph.replay()
        return self._logits.clone()

    monkeypatch.setattr(Graphed, "_run", recorded)
    return ran


def generated(model, ids, **options):
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None} | options
    return model.generate(ids, **settings)


def prompts(model, rows=1, tokens=9):
    return torch.randint(
        2, model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1)
    )


def attached(family, spec, *, replaying=False):
    model = tiny(family)
    if family in ("mixtral", "qwen3-moe", "gpt-oss"):  # other experts bring numbers to the host
        model.set_experts_implementation("batched_mm")
    kvkeep.attach(model, spec, linears=False, compile=None if replaying else False)
    return model


def expected(family, spec, ids, **options):
    """What `generate()` says without replayed steps."""
    return generated(attached(family, spec), ids, **options)


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", x)
        for x in (
            "keep_all",
            "keep_all+int8@fixed:60",
            "h2o:12+int8",
            "window:8",
            "snapkv:12,window=4",
        )
    ]
    + [
        (family, "keep_all")
        if family in ("gpt-oss", "deepseek-v3")
        else pytest.param(family, "keep_all", marks=pytest.mark.slow)
        for family in FAMILIES
        if family not in (*UNGRAPHED, "llama", "llama4")
    ],
)
def test_replayed_steps_say_what_ordinary_steps_say(steps, family, spec):
    ids = prompts(tiny(family), 2)
    mask = torch.ones_like(ids)
    if "fixed" in spec:  # growing storage has a part for each row of another length
        mask[0, :3] = 0
    given = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    ordinary = expected(family, spec, ids, **given)
    model = attached(family, spec, replaying=True)
    found = generated(model, ids, **given)
    assert steps == ["eager", "eager", "recorded", *["replayed"] * 16]
    assert found.sequences.equal(ordinary.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(ordinary.logits), atol=5e-5, rtol=1e-4
    )
    cache = found.past_key_values
    assert cache.fed == 28
    more = torch.cat([found.sequences, ids[:, :2]], dim=1)  # the cache goes on as any other
    mask = torch.cat([mask, torch.ones(2, 22, dtype=torch.int64)], dim=1)
    again = [
        generated(model, more, past_key_values=x.past_key_values, attention_mask=mask)
        for x in (found, ordinary)
    ]
    assert again[0].equal(again[1])


def test_sampled_text(steps):
    ids = prompts(tiny("llama"))
    said = []
    for replayed in (False, True):
        model = attached("llama", "keep_all", replaying=replayed)
        torch.manual_seed(7)
        said.append(generated(model, ids, do_sample=True, top_k=5))
    assert said[0].equal(said[1])
    assert "replayed" in steps


class Looks(StoppingCriteria):
    """Reads what a cache holds after some steps."""

    def __init__(self, cache, after):
        self.cache, self.after, self.found = cache, after, []

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] in self.after:
            self.found.append(self.cache.layers[0].positions().sort(dim=2).values)
        return torch.zeros(len(ids), dtype=torch.bool)


def test_a_cache_that_is_looked_at_meanwhile(steps):
    ids, looks = prompts(tiny("llama")), []
    for replayed in (False, True):
        model = attached("llama", "h2o:12", replaying=replayed)
        cache = kvkeep.Cache(model, "h2o:12")
        looks.append(Looks(cache, (14, 15, 20)))
        said = generated(model, ids, past_key_values=cache, stopping_criteria=[looks[-1]])
    assert said.equal(expected("llama", "h2o:12", ids))
    assert all(a.equal(b) for a, b in zip(looks[0].found, looks[1].found, strict=True))
    assert steps == ["eager", "eager", "recorded", "replayed", "eager"]  # two captures at most


def test_a_model_that_cannot_be_captured(steps, monkeypatch):
    ids = prompts(tiny("llama"))
    ordinary = expected("llama", "keep_all", ids)
    model = attached("llama", "keep_all", replaying=True)
    run, tried = Graphed._run, []

    def fails(self):
        if self._steps == 2:
            tried.append(self)
            raise UnsupportedError("a step asks the host")
        return run(self)

    def call(self, ids, called=Graphed.__call__):
        try:
            return called(self, ids)
        except UnsupportedError:
            self._complete = True  # as after a capture, which feeds nothing
            raise

    monkeypatch.setattr(Graphed, "_run", fails)
    monkeypatch.setattr(Graphed, "__call__", call)
    assert generated(model, ids).equal(ordinary)
    assert generated(model, ids).equal(ordinary)
    assert len(tried) == 1  # the second call knows


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"max_new_tokens": 15}, {"output_hidden_states": True}]
)
def test_calls_that_are_not_replayed(steps, options):
    model = attached("llama", "keep_all", replaying=True)
    given = {"return_dict_in_generate": True} if "output_hidden_states" in options else {}
    generated(model, prompts(model), **options, **given)
    assert steps == []


def test_a_hook_sees_every_step(steps):
    model, seen = attached("llama", "keep_all", replaying=True), []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    generated(model, prompts(model))
    assert len(seen) == 20


def test_a_call_that_fails_leaves_the_cache(steps):
    model = attached("llama", "keep_all", replaying=True)
    cache, ids = kvkeep.Cache(model), prompts(model)

    def fails(ids, scores, **kwargs):
        if ids.shape[1] == 15:
            raise ZeroDivisionError
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(ZeroDivisionError):
        generated(model, ids, past_key_values=cache, stopping_criteria=[fails])
    assert cache.fed == cache.layers[0].length == 14
    cache.crop(-5)
    assert generated(model, ids[:, :9], past_key_values=cache, max_new_tokens=2).shape == (1, 11)
