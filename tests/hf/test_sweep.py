"""No causal language model of transformers gives something else once it is attached."""

from __future__ import annotations

import pytest
from support.sweep_models import (
    FAILS,
    KVKEEP,
    NO,
    OWN,
    REFUSED,
    TABLE,
    TYPES,
    WORKS,
    WRONG,
    YES,
    Row,
    row_of,
    rows_of,
    sweep,
    written,
)

import kvkeep.hf.attention
import kvkeep.hf.rehearsal
import kvkeep.layer.step

TABLED = rows_of(TABLE.read_text())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", Row(WORKS, KVKEEP, *[YES] * 5)),
        ("codegen", Row(WORKS, OWN, NO, NO, *[YES] * 3)),  # its causal mask lies in a buffer
        ("moshi", Row(REFUSED)),
    ],
)
def test_some_types(kind, expected):
    found = row_of(kind)
    assert found == TABLED[kind]
    assert found._replace(why="") == expected
    assert bool(found.why) == (NO in found or found.outcome == REFUSED)


def test_a_wrong_step_is_seen(monkeypatch):
    step = kvkeep.hf.attention._in_own_dtype
    monkeypatch.setattr(kvkeep.hf.attention, "_in_own_dtype", lambda *args: 1.01 * step(*args))
    assert row_of("llama").outcome == WRONG


def test_a_cache_that_returns_something_else_is_seen(monkeypatch):
    """To a model that keeps its own attention; the rehearsal would refuse it."""
    monkeypatch.setattr(kvkeep.hf.rehearsal, "_own_fault", lambda _: "")
    in_order = kvkeep.LayerCache.in_order

    def changed(*args):
        held = in_order(*args)
        return held._replace(keys=held.keys.flip(2))

    monkeypatch.setattr(kvkeep.LayerCache, "in_order", changed)
    assert row_of("bloom").outcome == WRONG


def test_a_step_that_fails_is_seen(monkeypatch):
    def fail(*_, **__):
        raise ValueError("no step")

    monkeypatch.setattr(kvkeep.layer.step, "dispatch", fail)
    assert row_of("llama") == Row(FAILS, KVKEEP, why="logits: ValueError: no step")


def test_the_table_names_every_type_and_none_that_is_wrong():
    assert set(TABLED) == set(TYPES)
    assert not [kind for kind, found in TABLED.items() if found.outcome in (FAILS, WRONG)]
    assert written(TABLED) == TABLE.read_text()
    reasoned = {kind for kind, found in TABLED.items() if NO in found or found.outcome != WORKS}
    assert not [kind for kind in reasoned if not TABLED[kind].why]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type(kind):
    ((_, found),) = sweep([kind])
    assert found.outcome not in (FAILS, WRONG), found.why
    assert found == TABLED[kind]
