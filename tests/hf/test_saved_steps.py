"""Compiled steps on disk: which are found again, and by which models they are used."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from ctypes import c_int32, c_void_p
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.one_program import shared_model
from support.process_group import execute, start
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

import kvkeep
from kvkeep import native_library
from kvkeep.graph import shims
from kvkeep.graph.package import Package
from kvkeep.hf import compile_ahead
from kvkeep.hf.forward.packed import NUMBERS, numbers_up_to
from kvkeep.hf.steps import saved_steps
from kvkeep.hf.steps.compiling import Compiler
from kvkeep.hf.steps.model_state import ModelState

pytestmark = [
    pytest.mark.skipif(not native_library.available, reason=native_library.reason),
    pytest.mark.usefixtures("saved_graphs"),
]


def steps(model, count=3, cache=None):
    """The logits of some steps."""
    cache = kvkeep.Cache(model) if cache is None else cache
    with torch.no_grad():
        if not cache.fed:
            model(torch.arange(3, 9)[None], cache=cache)
        return torch.cat([model(torch.tensor([[5]]), cache=cache).logits for _ in range(count)], 1)


@pytest.fixture
def compiled():
    """Whether steps were compiled in this process, and how often programs have run."""
    model = shared_model()
    with kvkeep.attach(model, compile=True):
        steps(model, 1)


@pytest.fixture
def runs(compiled, monkeypatch):
    """What programs have done since."""
    found, run = [], Package.__call__

    def counted(self, *given):
        found.append(self)
        return run(self, *given)

    def never(*given):
        raise AssertionError("compiled again")

    monkeypatch.setattr(Package, "__call__", counted)
    monkeypatch.setattr(Compiler, "run", never)
    return found


def test_attach_uses_what_is_there(runs):
    model = shared_model()
    with kvkeep.attach(model, compile=False):
        expected = steps(model)
    assert not runs
    with kvkeep.attach(model) as attachment:
        assert attachment.compiled
        torch.testing.assert_close(steps(model), expected, atol=1e-4, rtol=1e-4)
    assert len(runs) == 3
    with kvkeep.attach(model, compile=True):
        torch.testing.assert_close(steps(model), expected, atol=1e-4, rtol=1e-4)
    assert len(runs) == 6


def test_refused_as_without_a_graph(compiled):
    model = shared_model()
    with kvkeep.attach(model), torch.no_grad():
        cache = kvkeep.Cache(model, "keep_all@fixed:8")
        model(torch.arange(3, 10)[None], past_key_values=cache)
        model(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(kvkeep.CapacityError, match="fixed at 8"):
            model(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(kvkeep.ShapeError, match="vocabulary"):
            model(torch.tensor([[500]]), past_key_values=cache)
        assert cache.fed == 8


def test_a_loaded_program_leaves_no_files(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    model = shared_model()
    with kvkeep.attach(model):
        steps(model, 1)
        assert len(runs) == 1
        assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.1),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        lambda model: setattr(model.model, "norm", nn.Identity()),
    ],
)
def test_not_by_another_model(runs, change):
    model = shared_model()
    change(model)
    with kvkeep.attach(model) as attachment:
        assert not attachment.compiled
        steps(model)
    assert not runs


def hooked(model):
    model.model.norm.register_forward_hook(lambda module, given, out: out * 2)


def replaced(model):
    model.model.norm.forward = lambda x: x * 2


def other_module(model):
    model.model.norm = nn.Identity()


def other_weight(model):
    model.model.norm.weight = nn.Parameter(torch.linspace(-1, 1, len(model.model.norm.weight)))


def other_helper(model, patch):
    own = modeling_qwen3.apply_rotary_pos_emb
    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda *given: own(*given))


def other_method(model, patch):
    patch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: x * 2)


def other_function(model, patch):
    model.model.norm.of_mine = torch.nn.functional.relu


def other_object(model, patch):
    model.model.norm.of_mine = SimpleNamespace(scale=0.5)


def other_scale(model, patch):
    model.model.layers[0].self_attn.scaling = 0.1


@pytest.mark.parametrize("change", [other_helper, other_method, other_function, other_object])
def test_other_code_has_another_key(change, monkeypatch):
    before = ModelState(shared_model()).key()
    model = shared_model()
    assert ModelState(model).key() == before
    change(model, monkeypatch)
    assert ModelState(model).key() != before


@pytest.mark.parametrize("change", [other_helper, other_method, other_scale])
def test_other_code_is_noticed(runs, change, monkeypatch):
    model = shared_model()
    with kvkeep.attach(model):
        steps(model, 1)
        assert len(runs) == 1
        change(model, monkeypatch)
        steps(model, 1)
    assert len(runs) == 1


def test_token_ids_of_any_layout(runs):
    model = shared_model()
    with kvkeep.attach(model), torch.no_grad():
        logits = []
        for token in (
            torch.tensor([[5]]),
            torch.tensor([[5]], dtype=torch.int32),
            torch.tensor([[1, 5]])[:, 1:],
        ):
            cache = kvkeep.Cache(model)
            model(torch.arange(3, 9)[None], cache=cache)
            logits.append(model(token, cache=cache).logits)
        assert logits[0].equal(logits[1])
        assert logits[0].equal(logits[2])
    assert len(runs) == 3


def test_not_by_a_model_whose_forward_was_replaced_before(runs):
    model = shared_model()
    own = model.forward
    model.forward = lambda *given, **options: own(*given, **options)
    with kvkeep.attach(model):
        steps(model)
    assert not runs


@pytest.mark.parametrize("change", [hooked, replaced, other_module, other_weight])
def test_changes_while_attached_are_noticed(runs, change):
    model, plain = shared_model(), shared_model()
    plain.load_state_dict(model.state_dict())
    kvkeep.attach(plain, compile=False)
    kvkeep.attach(model)
    caches = [kvkeep.Cache(plain), kvkeep.Cache(model)]
    for _ in range(2):
        found = [steps(one, 2, cache) for one, cache in zip((plain, model), caches, strict=True)]
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        for one in (plain, model):
            change(one)
    assert len(runs) == (4 if change is other_weight else 2)


def test_damaged_files_are_left_alone(runs):
    place = saved_steps.directory()
    name = saved_steps.name_of(ModelState(shared_model()).key(), ["input_ids"], 1)
    file, about = place / f"{name}.pt2", place / f"{name}.json"
    content, described = file.read_bytes(), about.read_text()
    other = json.loads(described) | {"inputs": 3}
    try:
        for data, text in (
            (content[:1000], described),
            (content[:-1] + b"x", described),
            (content, "{}"),
            (content, "no json"),
            (content, json.dumps(other)),
        ):
            file.write_bytes(data)
            about.write_text(text)
            model = shared_model()
            with kvkeep.attach(model):
                steps(model)
        assert not runs
    finally:
        file.write_bytes(content)
        about.write_text(described)


def test_only_so_many_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(saved_steps, "directory", lambda: tmp_path)
    monkeypatch.setattr(saved_steps, "_MOST", 3)
    for number in range(5):
        saved_steps.keep(b"program", str(number), {"logits": 0})
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert {x.name for x in tmp_path.iterdir()} == {
        f"{number}.{kind}" for number in (2, 3, 4) for kind in ("json", "pt2")
    }
    assert saved_steps.find("4") == (tmp_path / "4.pt2", {"logits": 0})
    assert saved_steps.find("1") is None


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_a_directory_of_others(monkeypatch, tmp_path):
    monkeypatch.undo()  # the directory of these tests
    monkeypatch.setenv("KVKEEP_STEPS", str(tmp_path / "steps"))
    assert saved_steps.directory() == tmp_path / "steps"
    (tmp_path / "steps").chmod(0o777)
    assert saved_steps.directory() is None
    (tmp_path / "steps").chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert saved_steps.directory() is None
    monkeypatch.setenv("KVKEEP_STEPS", "")
    assert saved_steps.directory() is None


_SECOND = """
import sys, torch, kvkeep
from support.one_program import shared_model
from kvkeep.graph.package import Package
before = "torch._inductor.compile_fx" in sys.modules  # torchao imports it, and PEFT torchao
run, found = Package.__call__, []
Package.__call__ = lambda self, *given: found.append(1) or run(self, *given)
model = shared_model()
with torch.no_grad(), kvkeep.attach(model):
    cache = kvkeep.Cache(model)
    model(torch.arange(3, 9)[None], cache=cache)
    model(torch.tensor([[5]]), cache=cache)
assert found == [1]
assert before or "torch._inductor.compile_fx" not in sys.modules
"""


def test_another_process(compiled):
    code = f"import os; os.environ['KVKEEP_STEPS'] = {str(saved_steps.directory())!r}\n{_SECOND}"
    start(execute, 1, code, [], [str(Path(__file__).parent.parent)])


@pytest.mark.slow  # compiles a program of its own
def test_a_float64_weight_that_is_no_longer_tied():
    plain = shared_model(tie_word_embeddings=True).double()
    model = shared_model(tie_word_embeddings=True).double()
    model.load_state_dict(plain.state_dict())
    with kvkeep.attach(plain, compile=False):
        with kvkeep.attach(model, compile=True):
            # Rotary angles are in float32.
            torch.testing.assert_close(steps(model), steps(plain), atol=1e-5, rtol=1e-4)
        with kvkeep.attach(model) as attachment:  # compiles nothing further
            assert attachment.compiled
            for one in (plain, model):
                steps(one, 1)
                head = torch.linspace(-1, 1, one.lm_head.weight.numel(), dtype=torch.float64)
                one.lm_head.weight = nn.Parameter(head.view_as(one.lm_head.weight))
            torch.testing.assert_close(steps(model), steps(plain), atol=1e-5, rtol=1e-4)


def test_an_interrupt_before_the_first_instruction_of_a_step(compiled, monkeypatch):
    """Python returns 0 then, and has no error to note."""
    model = shared_model()
    monkeypatch.setattr(shims, "_called_step", ctypes.CFUNCTYPE(c_int32, c_void_p)(lambda at: 0))
    with kvkeep.attach(model, "h2o:8"), torch.no_grad():
        cache = kvkeep.Cache(model, "h2o:8")
        model(torch.arange(3, 9)[None], cache=cache)
        shims.connect.__wrapped__()
        try:
            with pytest.raises(KeyboardInterrupt):
                model(torch.tensor([[5]]), cache=cache, attention_mask=torch.ones(1, 7))
        finally:
            monkeypatch.undo()
            shims.connect.__wrapped__()


def test_when_compiling_pays(compiled):
    """A program of a single row does not keep a server from compiling those of several."""
    model, most = shared_model(), compile_ahead.PAYS_AFTER
    assert not compile_ahead.pays(model, 10 * most)
    assert not compile_ahead.pays(model, 2 * most - 1, sequences=2)
    assert compile_ahead.pays(model, 2 * most, sequences=2)
    compile_ahead.note_tokens(model, most)
    assert compile_ahead.pays(model, most, sequences=2)
    compile_ahead.note_tokens(model, -1)
    compile_ahead.note_tokens(model, most)
    assert not compile_ahead.pays(model, 10 * most, sequences=2)
    next(saved_steps.directory().glob("*.tokens")).unlink()


def test_a_full_disk_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(saved_steps, "directory", lambda: tmp_path)
    written = saved_steps.write_all

    def fails(handle, data):
        if data.startswith(b"{"):
            raise OSError("full")
        written(handle, data)

    monkeypatch.setattr(saved_steps, "write_all", fails)
    saved_steps.keep(b"program", "name", {})
    assert not [*tmp_path.iterdir()]
    (tmp_path / "key-input_ids-1.pt2").write_bytes(b"alone")
    assert not saved_steps.files_of("key")


def test_numbers_of_rows_that_have_programs():
    assert [numbers_up_to(n) for n in (1, 2, 3, 5)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
    assert numbers_up_to(1000) == [*NUMBERS]
