"""Compiled steps and exported programs of models with recurrent layers, or with layers that share
keys and values."""

from __future__ import annotations

import copy
import json
import zipfile
from typing import Any

import pytest
import torch
from support.random_ids import ids
from support.sweep_configs import model_of
from torch._dynamo.exc import Unsupported

import kvkeep
from kvkeep import Cache
from kvkeep.errors import SavedCacheError, StateError, UnsupportedError
from kvkeep.graph.package import Package
from kvkeep.layer.layer import LayerCache

pytestmark = pytest.mark.usefixtures("saved_graphs")

KINDS = [
    "lfm2",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("qwen3_5_text", "jamba", "falcon_h1", "gemma3n_text", "gemma4_text")
    ),
]
SPECS = ("keep_all", "window:6,sinks=1", "h2o:8", "keep_all+int8@concat")
NEAR = {"atol": 1e-3, "rtol": 1e-3}


def tiny(kind: str) -> Any:
    return model_of(kind, 4 if kind.startswith("gemma") else 2)


def pair(kind: str) -> tuple[Any, Any]:
    """A model attached without and with compile=True, with the same weights."""
    model = tiny(kind)
    other = copy.deepcopy(model)
    kvkeep.attach(model, compile=False)
    kvkeep.attach(other, compile=True)
    return model, other


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each run of a program."""
    found: list[int] = []
    run = Package.__call__

    def noted(self: Any, *given: Any) -> Any:
        found.append(1)
        return run(self, *given)

    monkeypatch.setattr(Package, "__call__", noted)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_serves_all_caches(kind: str, programs: list[int]) -> None:
    """In turns, so that no state of one cache stays in the program; after a fork, a copy in a file
    and marks; and between longer chunks."""
    plain, model = pair(kind)
    caches = [(Cache(plain, spec), Cache(model, spec)) for spec in SPECS]
    text = ids(1, 40)

    def feed(part: torch.Tensor, each: list[tuple[Cache, Cache]]) -> None:
        for one, other in each:
            expected = plain(part, past_key_values=one).logits
            torch.testing.assert_close(model(part, past_key_values=other).logits, expected, **NEAR)

    for part in text[:, :21].split([9, 1, 1, 1, 6, 1, 1, 1], dim=1):
        feed(part, caches)
    for one, other in caches:
        one.mark()
        other.mark()
    forks = [(one.freeze().fork(), other.freeze().fork()) for one, other in caches]
    for at in range(25, 30):
        feed(text[:, at : at + 1], caches)
    for one, other in caches:
        if all(layer.rollback_limit >= one.fed - 21 for layer in one.layers):  # none has evicted
            one.rewind(21)
            other.rewind(21)
    for at in range(30, 36):
        feed(text[:, at : at + 1], [*caches, *forks])
    assert all(one.stats() == other.stats() for one, other in caches)
    assert len(programs) == (6 + 5) * len(caches) + 6 * 2 * len(caches)


@torch.no_grad()
def test_states_of_an_interrupted_program_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("lfm2")
    text, cache = ids(1, 20), Cache(model)
    for part in text[:, :12].split([9, 1, 1, 1], dim=1):
        model(part, past_key_values=cache)
    cache.mark()
    last = model(text[:, 12:13], past_key_values=cache).logits

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[-1], "prepare", lambda: None)
        patch.setattr(cache.layers[-1], "run", fails)
        with pytest.raises(KeyboardInterrupt):
            model(text[:, 13:14], past_key_values=cache)
    with pytest.raises(StateError, match="rewind"):
        model(text[:, 13:14], past_key_values=cache)
    cache.rewind(12)
    torch.testing.assert_close(model(text[:, 12:13], past_key_values=cache).logits, last)


def test_a_graph_of_ones_own_keeps_no_states() -> None:
    model = tiny("lfm2")
    with kvkeep.attach(model), torch.no_grad():
        cache = Cache(model)
        model(ids(1, 5), past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        with pytest.raises(Unsupported, match=r"attach\(model, compile=True\)"):
            step(ids(1, 1), past_key_values=cache)
        assert model(ids(1, 1), past_key_values=cache).logits.isfinite().all()


# -- exported programs ----------------------------------------------------------------------


def expected_of(model: Any, spec: str, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits after the prompt of 12 tokens and each later token."""
    cache, found = Cache(model, spec), []
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with kvkeep.attach(model), torch.no_grad():
        for start, stop in ((0, 12), *((at, at + 1) for at in range(12, text.shape[1]))):
            logits = model(
                text[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=place[:, start:stop],
                past_key_values=cache,
            ).logits
            found.append(logits[:, -1])
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("lfm2", "window:6,sinks=1@fixed"),
        pytest.param("gemma4_text", "h2o:8@fixed", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "window:6,sinks=1@fixed", marks=pytest.mark.slow),
        pytest.param("jamba", "keep_all+int8@fixed:32", marks=pytest.mark.slow),
        pytest.param("bamba", "keep_all@fixed:32", marks=pytest.mark.slow),
        pytest.param("gemma3n_text", "tova:8@fixed", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "window:6,sinks=1@fixed", marks=pytest.mark.slow),  # complex
        pytest.param("longcat_flash", "keep_all@fixed:32", marks=pytest.mark.slow),
    ],
)
def test_programs(kind: str, spec: str, tmp_path: Any) -> None:
    """With padding, which must change no state; saved in the midst of a text; and again after a
    reset. (Some programs read the prompt token by token, so their policies are those whose
    decisions do not depend on that.)"""
    model, text = tiny(kind), ids(2, 20)
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    expected = expected_of(model, spec, text, mask)
    program = kvkeep.export(model, spec, rows=2)
    for _ in range(2):
        program.reset()
        found = [program(text[:, :12], mask[:, :12])]
        found += [program(text[:, at : at + 1]) for at in range(12, 16)]
        program.save(tmp_path / "a.pt2")
        program = kvkeep.Program.load(tmp_path / "a.pt2")
        found += [program(text[:, at : at + 1]) for at in range(16, 20)]
        torch.testing.assert_close(torch.stack(found, dim=1), expected, **NEAR)


@pytest.fixture(scope="module")
def reading() -> Any:
    """A program with layers that read an earlier layer's slots."""
    return kvkeep.export(tiny("gemma4_text"), "h2o:6@fixed")


def test_a_program_that_was_interrupted_before_a_reading(
    reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, program = ids(1, 12), reading
    program.reset()
    first = program(text)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(LayerCache, "read", fails)
        with pytest.raises(KeyboardInterrupt):
            program(text[:, :1])
    with pytest.raises(StateError, match="interrupted"):
        program(text[:, :1])
    program.reset()
    assert program(text).equal(first)


def test_a_file_whose_reading_has_another_state_is_refused(reading: Any, tmp_path: Any) -> None:
    path, other = tmp_path / "a.pt2", tmp_path / "b.pt2"
    reading.reset()
    reading.save(path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("models/model.json"):
                model = json.loads(data)
                nodes = model["graph_module"]["graph"]["nodes"]
                readings = [node for node in nodes if "read_in" in node["target"]]
                steps = [node for node in nodes if "step_in" in node["target"]]
                last = next(x for x in steps if x["inputs"][1] != readings[0]["inputs"][1])
                readings[0]["inputs"][0] = last["inputs"][0]
                data = json.dumps(model).encode()
            target.writestr(name, data)
    with pytest.raises(SavedCacheError, match="made no step"):
        kvkeep.Program.load(other)


def test_states_that_do_not_begin_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("zaya")
    for part in model.modules():
        if hasattr(part, "v_proj_delayed"):
            part.v_proj_delayed.bias = torch.nn.Parameter(
                torch.ones(part.v_proj_delayed.out_features)
            )
    with pytest.raises(UnsupportedError, match="states other than zeros"):
        kvkeep.export(model, "keep_all@fixed:16")
