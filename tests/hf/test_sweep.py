"""No causal language model of transformers gives something else once it is attached."""

from __future__ import annotations

import pytest
import support.sweep_models
from support.odd_attention import odd
from support.sweep_configs import TYPES
from support.sweep_features import PROGRAMS
from support.sweep_models import row_of, sweep
from support.sweep_page import (
    FAILS,
    FEATURES,
    KVKEEP,
    PAGE,
    REFUSED,
    WORKS,
    WRONG,
    YES,
    Row,
    rows_of,
    written,
)

import kvkeep.hf.forward.rehearsal
import kvkeep.layer.step
from kvkeep.hf.forward import attention
from kvkeep.layer.contents import Contents

ROWS = rows_of(PAGE.read_text())

COMPILED = (
    "llama",
    "beam",  # experts, windows
    "bert",  # positions that are learned
    "bloom",  # its own attention
    "dbrx",  # what torch cannot trace
    "deepseek_v3",  # a latent
    "gemma4_text",  # shared keys and values
    "gpt_oss",  # sinks
    "lfm2",  # states
    "llama4_text",  # chunked attention
    "phi4_multimodal",
    "whisper",  # no positions in its forward
)
"""The types whose programs are compared: those of all take too long."""

QUICK = [name for name in FEATURES if name not in PROGRAMS]


def without_programs(row):
    return row._replace(**dict.fromkeys(PROGRAMS, ""))


@pytest.mark.parametrize("kind", ["llama", "moshi"])
def test_some_types(kind):
    assert row_of(kind, QUICK) == without_programs(ROWS[kind])


def test_what_stands_there():
    llama, moshi, mamba = (ROWS[kind] for kind in ("llama", "moshi", "mamba"))
    assert llama == Row("4 full; 4/4 heads of 8", WORKS, KVKEEP, *[YES] * len(FEATURES))
    assert moshi.outcome == REFUSED
    assert mamba.window == mamba.attention != KVKEEP
    assert mamba.save == YES


def test_a_wrong_step_is_seen(monkeypatch):
    step = attention._in_own_dtype
    monkeypatch.setattr(attention, "_in_own_dtype", lambda *args: 1.01 * step(*args))
    assert row_of("llama").outcome == WRONG


def test_a_cache_that_returns_something_else_is_seen(monkeypatch):
    """To a model that keeps its own attention; the rehearsal would refuse it."""
    monkeypatch.setattr(kvkeep.hf.forward.rehearsal, "_own_fault", lambda _: "")
    in_order = Contents.in_order

    def changed(*args):
        held = in_order(*args)
        return held._replace(keys=held.keys.flip(2))

    monkeypatch.setattr(Contents, "in_order", changed)
    monkeypatch.setattr(support.sweep_models, "model_of", lambda _: odd())
    assert row_of("llama").outcome == WRONG


@pytest.mark.parametrize(
    ("kind", "place", "wrong", "why"),
    [
        ("exaone4", "kvkeep.hf.host.as_applied", lambda _, found: found, "join: logits off"),
        ("roberta", "kvkeep.hf.forward.placing.first_position", lambda _: 0, "pack: "),
    ],
)
def test_wrong_positions_are_seen(kind, place, wrong, why, monkeypatch):
    """Of a layer without a rotary embedding, and where the first position is not 0."""
    monkeypatch.setattr(place, wrong)
    found = row_of(kind, [why.partition(":")[0]])
    assert found.outcome == WRONG
    assert found.why.startswith(why)


def test_a_step_that_fails_is_seen(monkeypatch):
    def fail(*_, **__):
        raise ValueError("no step")

    monkeypatch.setattr(kvkeep.layer.step, "dispatch", fail)
    found = row_of("llama")
    assert (found.outcome, found.why) == (FAILS, "logits: ValueError: no step")


def test_the_page_names_every_type_and_none_that_is_wrong():
    assert set(ROWS) == set(TYPES)
    assert not [kind for kind, row in ROWS.items() if row.outcome in (FAILS, WRONG)]
    assert not [kind for kind, row in ROWS.items() if row.incomplete]
    assert not [kind for kind, row in ROWS.items() if row.outcome != WORKS and not row.why]
    assert written(ROWS) == PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type(kind):
    programs = kind in COMPILED
    ((_, found),) = sweep({kind: FEATURES if programs else QUICK})
    assert found.outcome not in (FAILS, WRONG), found.why
    assert found == (ROWS[kind] if programs else without_programs(ROWS[kind]))
