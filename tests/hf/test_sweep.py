"""No causal language model of transformers gives something else once it is attached."""

from __future__ import annotations

import pytest
from support import sweep_models
from support.sweep_models import FAILS, REFUSED, TYPES, WORKS, WRONG, outcome_of, sweep

import kvkeep.hf.attention
import kvkeep.layer.step


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", WORKS), ("deepseek_v3", WORKS), ("jetmoe", REFUSED)]
)
def test_some_types(kind, expected):
    assert outcome_of(kind).kind == expected


def test_a_wrong_step_is_seen(monkeypatch):
    step = kvkeep.hf.attention._in_own_dtype
    monkeypatch.setattr(kvkeep.hf.attention, "_in_own_dtype", lambda *args: 1.01 * step(*args))
    assert outcome_of("llama").kind == WRONG


def test_a_step_that_fails_is_seen(monkeypatch):
    def fail(*_, **__):
        raise ValueError("no step")

    monkeypatch.setattr(kvkeep.layer.step, "dispatch", fail)
    assert outcome_of("llama") == (FAILS, "logits: ValueError: no step")


def test_the_table_names_every_type_and_none_that_is_wrong():
    rows = sweep_models._rows_of(sweep_models.TABLE.read_text())
    assert set(rows) == set(TYPES)
    assert not [kind for kind, found in rows.items() if found.kind in (FAILS, WRONG)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type(kind):
    ((_, found),) = sweep([kind])
    assert found.kind not in (FAILS, WRONG), found.reason
