"""Exported programs: another process, the same tokens."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from support.slow import slow_unless
from support.tiny_models import FAMILIES, tiny

import kvkeep
from kvkeep.errors import (
    CapacityError,
    SavedCacheError,
    ShapeError,
    SpecError,
    StateError,
    UnsupportedError,
)
from kvkeep.graph import export_op
from kvkeep.graph.custom_ops import run
from kvkeep.graph.export_op import step_in
from kvkeep.layer.writing import Writer

SPECS = [
    "keep_all@fixed:128",
    "keep_all+int8@fixed:128",
    "window:32,sinks=2@fixed",
    "window:32,sinks=2+int8/int4@fixed",
    "h2o:40+fp8@fixed",
    "tova:40,step=7+int4@fixed",
    "pyramid(snapkv:40,window=32)@fixed",
]
ALL = [("llama", spec) for spec in SPECS]
ALL += [(name, SPECS[0]) for name in FAMILIES if name != "llama"]
ALL += [(name, SPECS[3]) for name in ("gemma2", "gpt-oss")]
ALL += [(name, SPECS[6]) for name in ("gemma2", "gpt-oss", "granite")]
CASES = slow_unless(lambda case: case == ("gemma2", SPECS[6]), ALL)


def prompt(model, tokens=9, rows=2):
    return torch.randint(3, model.config.vocab_size, (rows, tokens))


def eager(model, spec, ids, mask, steps):
    """Greedy tokens (B, steps) of the model itself."""
    cache, found = kvkeep.Cache(model, spec), []
    with kvkeep.attach(model), torch.inference_mode():
        fed, place = ids, (mask.cumsum(1) - 1).clamp(min=0)
        for _ in range(steps):
            logits = model(fed, attention_mask=mask, position_ids=place, past_key_values=cache)
            fed = logits.logits[:, -1:].argmax(dim=-1)
            mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
            place = mask.sum(dim=1, keepdim=True) - 1
            found.append(fed)
    return torch.cat(found, dim=1)


def exported(program, ids, mask, steps):
    """Greedy tokens (B, steps) of a program."""
    found, logits = [], program(ids, mask)
    for _ in range(steps):
        found.append(logits.argmax(dim=-1, keepdim=True))
        logits = program(found[-1])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_round_trip(family, spec, tmp_path):
    model = tiny(family, max_position_embeddings=512)
    saved = kvkeep.export(model, spec, rows=2)
    saved.save(tmp_path / "a.pt2")
    program = kvkeep.Program.load(tmp_path / "a.pt2")
    assert attributes(program) == attributes(saved)
    require_attributes(program, model)
    for tokens, padding, steps in ((30, 4, 12), (50, 0, 3), (1, 0, 2)):
        ids = prompt(model, tokens)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        program.reset()
        expected = eager(model, spec, ids, mask, steps)
        assert exported(program, ids, mask, steps).equal(expected)
        assert program.fed == tokens + steps


@pytest.mark.slow  # which imports torch
def test_another_process(tmp_path):
    model = tiny("llama", num_hidden_layers=1)
    path = tmp_path / "a.pt2"
    program = kvkeep.export(model, "window:32,sinks=2+int8@fixed")
    ids = prompt(model, rows=1)
    first = program(ids)
    program.save(path)  # in the middle of a text
    then = [program(torch.tensor([[token]])) for token in (5, 6, 7)]
    torch.save({"logits": [first, *then]}, tmp_path / "expected")
    code = """
import sys, torch, kvkeep
program = kvkeep.Program.load(sys.argv[1])
assert program.fed == 9
expected = torch.load(sys.argv[2], weights_only=True)["logits"]
for token, logits in zip((5, 6, 7), expected[1:]):
    assert program(torch.tensor([[token]])).equal(logits)
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "expected"], check=True)


def attributes(program):
    """What every attention of a program was given beside tensors."""
    return [
        (node.args[1], *node.args[6:8], node.args[8] is not None)
        for node in program._traced.graph.nodes
        if node.target is torch.ops.kvkeep.step_in.default
    ]


def require_attributes(program, model):
    """Windows, scales, softcaps and sinks are those of the model, where it has them."""
    text, scale, softcap, sinks = zip(*attributes(program), strict=True)
    windows = [json.loads(one)["window"] for one in text]
    config = model.config
    if config.model_type in ("gemma2", "gpt_oss", "granite"):
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * 2
        assert windows == [config.sliding_window if "sliding" in kind else None for kind in kinds]
        own = model.model.layers[0].self_attn.scaling
        assert scale == (getattr(config, "attention_multiplier", own),) * 2
    assert set(softcap) == {getattr(config, "attn_logit_softcapping", None)}
    assert set(sinks) == {config.model_type == "gpt_oss"}


def test_compiled():
    torch._dynamo.reset()
    model = tiny("llama", num_hidden_layers=1)
    ids = prompt(model, rows=1)
    mask = torch.ones_like(ids)
    program = kvkeep.export(model, SPECS[0])
    program.compile(backend="eager")
    assert exported(program, ids, mask, 9).equal(eager(model, SPECS[0], ids, mask, 9))


def test_what_cannot_be_exported():
    model = tiny("llama")
    for spec, remedy in (
        ("keep_all", "as keep_all+plain@fixed:4096"),
        ("keep_all+int8@concat", "as keep_all+int8@fixed:4096"),
        ("window:16,sinks=2", "as window:16,sinks=2+plain@fixed"),
        ("adakv(h2o:40)", "adakv divides slots among heads; use another"),
        ("expected_attention:40@fixed", "the state of policy expected_attention grows"),
    ):
        with pytest.raises(UnsupportedError, match=f"cannot be exported: .*{re.escape(remedy)}"):
            kvkeep.export(model, spec)
    with pytest.raises(SpecError):
        kvkeep.export(model, "keep_most@fixed:64")
    for rows in (0, -1, 2.5, True):
        with pytest.raises(SpecError, match="a whole number"):
            kvkeep.export(model, SPECS[0], rows=rows)
    assert not model.config._attn_implementation.startswith("kvkeep")


def test_infinite_numbers(monkeypatch, tmp_path):
    """Routers of experts mask with them (dots1)."""
    model = tiny("llama", num_hidden_layers=1)
    mlp = type(model.model.layers[0].mlp)
    own = mlp.forward

    def masked(self, x):
        scores = own(self, x)
        low = scores.masked_fill(scores < 0, -torch.inf).masked_fill(scores > 1, torch.inf)
        return low.clamp(-1, 1)

    monkeypatch.setattr(mlp, "forward", masked)
    program = kvkeep.export(model, SPECS[0])
    program.save(tmp_path / "a.pt2")
    ids = prompt(model, rows=1)
    assert kvkeep.Program.load(tmp_path / "a.pt2")(ids).equal(program(ids))


def test_a_model_that_torch_cannot_trace(monkeypatch):
    model = tiny("llama", num_hidden_layers=1)
    before = model.config._attn_implementation
    mlp = type(model.model.layers[0].mlp)
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: own(self, x) if x.sum() > 0 else x)
    with pytest.raises(UnsupportedError, match="torch cannot export a step of LlamaForCausalLM: "):
        kvkeep.export(model, SPECS[0])
    assert model.config._attn_implementation == before


def test_bad_input():
    model = tiny("llama", num_hidden_layers=1)
    before = model.config._attn_implementation
    program = kvkeep.export(model, "keep_all@fixed:16", rows=2)
    assert model.config._attn_implementation == before
    ids = prompt(model)
    first = program(ids)
    cases = [
        (ShapeError, "for a program of 2 rows", ids[:1], None),
        (ShapeError, "for a program of 2 rows", ids[:, :0], None),
        (ShapeError, "give int64", ids.float(), None),
        (ShapeError, "give tensors", ids.tolist(), None),
        (ShapeError, "give tensors", ids, ids.tolist()),
        (ShapeError, "its vocabulary has 0 to 95", ids + 90, None),
        (ShapeError, "its vocabulary has 0 to 95", -ids, None),
        (ShapeError, "pad on the left", ids, torch.zeros_like(ids)),
        (ShapeError, "the new tokens only", ids, torch.ones(2, 18)),
        (CapacityError, "fixed at 16", ids, None),
    ]
    for kind, message, tokens, mask in cases:
        with pytest.raises(kind, match=message):
            program(tokens, mask)
    assert program.fed == 9
    last = program(ids[:, :1])
    program.reset()
    assert program(ids).equal(first)
    assert program(ids[:, :1]).equal(last)
    with pytest.raises(SavedCacheError, match=r"names that end in \.pt2"):
        program.save("a.bin")
    with pytest.raises(SavedCacheError, match="cannot save"):
        program.save("/nowhere/a.pt2")
    layer = program._step.layers.get_submodule("0")
    state = list(layer.buffers())[1:]
    text = attributes(program)[0][0]
    x = torch.zeros(2, 2, 1, 8)
    with pytest.raises(StateError, match="tensors, but a layer has"):
        step_in(state, text, x, x, x, torch.zeros(2, 1, dtype=torch.int32), 1.0, None, None)


def test_a_step_that_was_interrupted(tmp_path, monkeypatch):
    model = tiny("llama")
    ids = prompt(model, 60, rows=1)
    program = kvkeep.export(model, "window:16@fixed")
    expected = program(ids)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "settle", interrupted)
        program.reset()
        with pytest.raises(KeyboardInterrupt):
            program(ids)
    program.reset()
    assert program(ids).equal(expected)

    steps = []

    def second(*arguments, **options):
        steps.append(arguments)
        return run(*arguments, **options) if len(steps) == 1 else interrupted()

    with monkeypatch.context() as patch:
        patch.setattr(export_op, "run", second)
        with pytest.raises(KeyboardInterrupt):
            program(ids[:, :1])
    for call in (lambda: program(ids[:, :1]), lambda: program.save(tmp_path / "a.pt2")):
        with pytest.raises(StateError, match="a step was interrupted"):
            call()
    program.reset()
    assert program(ids).equal(expected)


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("slots", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_few_slots(slots):
    """And a model in training, attached, is left as it was."""
    model = tiny("llama", num_hidden_layers=1).train()
    model.lm_head.eval()
    with kvkeep.attach(model):
        attached = model.config._attn_implementation
        program = kvkeep.export(model, f"keep_all@fixed:{slots}")
        assert model.config._attn_implementation == attached
    assert model.training
    assert not model.lm_head.training
    ids = prompt(model, slots, rows=1)
    logits = [program(ids[:, i : i + 1]) for i in range(slots)][-1]
    assert logits.argmax().equal(model(ids).logits[0, -1].argmax())
    with pytest.raises(CapacityError):
        program(ids[:, :1])


def test_learned_positions_end():
    model = tiny("gpt2", max_position_embeddings=20, num_hidden_layers=1)
    program = kvkeep.export(model, "keep_all@fixed:300")
    assert program.header.room == 20
    with pytest.raises(CapacityError, match="fixed at 20"):
        program(prompt(model, 21, rows=1))
