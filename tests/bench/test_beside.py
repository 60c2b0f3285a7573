"""Busy processes are surely ended, and each number of threads is measured beside them."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from kvkeep_lab.bench import beside
from kvkeep_lab.bench.options import Decode
from support.tiny_models import tiny

from kvkeep import threads


def test_busy_processes_end_with_an_error(monkeypatch):
    monkeypatch.setattr(beside, "_SETTLED_S", 0.0)
    before, mine = set(psutil.Process().children()), set()

    def interrupted():
        mine.update(set(psutil.Process().children()) - before)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), beside.busy_processes(2):
        interrupted()
    assert len(mine) == 2
    assert not any(process.is_running() for process in mine)


def test_each_choice_is_measured(monkeypatch):
    used, before = [], torch.get_num_threads()
    model = tiny("llama")
    model.model.register_forward_pre_hook(
        lambda *_: used.append((os.environ.get(threads.OFF), torch.get_num_threads() == 1))
    )
    monkeypatch.setattr(beside, "_SETTLED_S", 0.0)
    monkeypatch.setattr(beside, "_CONTEXT", 9)
    monkeypatch.setattr(beside, "model_named", lambda *_: (model, None))
    monkeypatch.setattr(beside, "tokens_of_text", lambda _, n: torch.arange(1, n + 1)[None])
    asked = Decode("tiny", ways=["default", "batch"], beside=[0])
    found = beside.run(asked, tokens=4, turns=1)
    rows = {(row["system"], row["threads"]): row for row in found["rows"]}
    assert len(rows) == 6
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert [case for case, row in rows.items() if row["ratio"] is not None] == [
        ("kvkeep", "chosen"),
        ("batch", "chosen"),
    ]
    assert {("fixed", True), ("fixed", before == 1), (None, before == 1)} <= set(used)
    assert torch.get_num_threads() == before
    assert threads.OFF not in os.environ
