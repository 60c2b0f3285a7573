"""A row for each answer, in a file that is written as the run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from io import FileIO

import pytest
from kvkeep_lab.evals.answers import scored
from kvkeep_lab.evals.run import evaluate
from kvkeep_lab.evals.samples import SamplesError, recorder, row_of
from support import tiny_models
from support.task_prompts import Characters, made
from support.token_letters import Letters

ROW = {"task": "needle", "generated": "caf\u00e9\u2028\n"}


def test_a_row_has_what_the_answer_is_scored_by():
    prompt = replace(made("variables", length=1500, seed=7)[3], answers=("ABCDE", "FGHIJ"))
    answer = scored(Characters(), prompt, [*map(ord, " ABCDE"), 3])
    assert row_of("window:4", 1500, "variables", 13, prompt, answer) == {
        "spec": "window:4",
        "context": 1500,
        "task": "variables",
        "sample": 13,
        "seed": 7,
        "depth": 70,
        "tokens": 1500,
        "expected": ["ABCDE", "FGHIJ"],
        "generated": " ABCDE",
        "metric": "contained",
        "score": 0.5,
    }


def test_rows_of_a_run_give_its_figures():
    model, rows = tiny_models.tiny("llama", max_position_embeddings=1024), []
    tasks = ["needle", "passage-count"]
    found = evaluate(
        model,
        Letters(),
        ["window:64"],
        contexts=[700, 800],
        continuation=1,
        windows=2,
        tasks=tasks,
        samples=2,
        record=rows.append,
    )
    # `keep_all` is always measured.
    assert len(rows) == len({(r["spec"], r["context"], r["task"], r["sample"]) for r in rows}) == 32
    for one in found["rows"]:
        for task in tasks:
            of = (one["spec"], one["context"], task)
            mine = [row for row in rows if (row["spec"], row["context"], row["task"]) == of]
            assert [row["sample"] for row in mine] == [0, 1, 2, 3]
            assert [row["seed"] for row in mine] == [0, 0, 1, 1]
            mean = sum(row["score"] for row in mine) / 4
            assert one["tasks"][task]["accuracy"] == pytest.approx(mean)


def test_each_row_is_in_the_file_at_once(tmp_path):
    file = tmp_path / "samples.jsonl"
    record = recorder(file, {"model": "m"})
    assert not file.exists()  # a run that is refused leaves none
    for score in (0, 1):
        record({**ROW, "score": score})
        lines = file.read_text().splitlines()
        assert json.loads(lines[-1]) == {"model": "m", **ROW, "score": score}
    assert len(lines) == 2
    recorder(None, {})(ROW)


def test_a_file_is_replaced_only_if_asked_for_and_when_there_is_a_row(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text("old")
    with pytest.raises(SamplesError, match="exists; give another name, or --overwrite"):
        recorder(file, {})
    record = recorder(file, {}, overwrite=True)
    assert file.read_text() == "old"
    record(ROW)
    assert json.loads(file.read_text()) == ROW
    with pytest.raises(SamplesError, match="there is no directory"):
        recorder(tmp_path / "none" / "x.jsonl", {})
    with pytest.raises(SamplesError, match="exists"):
        recorder(tmp_path, {}, overwrite=True)
    other = tmp_path / "other.jsonl"
    record = recorder(other, {})
    other.write_text("another run's")
    with pytest.raises(SamplesError, match="cannot write samples to"):
        record(ROW)
    assert other.read_text() == "another run's"


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    class Filling(FileIO):
        def write(self, line):
            return super().write(line[:5] if self.tell() else line)

    monkeypatch.setattr("kvkeep_lab.evals.samples.FileIO", Filling)
    file = tmp_path / "samples.jsonl"
    record = recorder(file, {})
    record(ROW)
    with pytest.raises(SamplesError, match="no space"):
        record(ROW)
    assert file.read_text() == json.dumps(ROW) + "\n"
