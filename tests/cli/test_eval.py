"""`kvkeep eval` and `kvkeep inspect`, as a user calls them."""

from __future__ import annotations

import json
import re

import pytest
from kvkeep_lab.cli.inspect import ASCII_BARS, BARS, DOTTED, bar
from support import finetune_inputs
from support.command_line import last_line, run
from support.demo_stand_in import LAYERS
from support.sweep_configs import model_of
from typer.testing import CliRunner

from kvkeep.cli.app import app

PROMPT = "One two three four five six seven eight nine ten eleven twelve"


def data_of(page):
    """What a page shows."""
    return json.loads(re.search(r'id="data">(.*)</script>', page.read_text())[1])


@pytest.fixture
def _model(stand_in_home, monkeypatch):
    """A fast demo model."""
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)


@pytest.mark.usefixtures("_model")
def test_eval(tmp_path):
    picture, text = tmp_path / "quality.svg", tmp_path / "text.txt"
    page = tmp_path / "quality.html"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog wonders why. " * 20)
    options = ("--context", "16,24", "--continuation", "3", "--windows", "2", "--chunk", "16")
    files = (
        "--text",
        str(text),
        "--plot",
        str(picture),
        "--no-retrieval",
        "--json",
        "--html",
        str(page),
    )
    result = run("eval", "--specs", "window:8; keep_all", *options, *files)
    found = last_line(result)
    assert [(row["spec"], row["context"]) for row in found["rows"]] == [
        ("window:8", 16),
        ("keep_all", 16),
        ("window:8", 24),
        ("keep_all", 24),
    ]
    window, full = found["rows"][:2]
    assert full == found["baseline"][0]
    assert (full["kl"], full["top1"], full["perplexity_ratio"]) == (0, 1, 1)
    assert window["kl"] > 0
    assert window["bytes"] == LAYERS * 8 * (2 * 3 * 64 * 4 + 4)
    assert full["bytes"] == LAYERS * 16 * (2 * 3 * 64 * 4 + 4)
    assert (found["windows"], found["chunk"]) == (2, 16)
    assert found["environment"]["torch"]
    assert "window:8" in result.stderr
    assert b"<svg" in picture.read_bytes()
    drawn = data_of(page)
    assert drawn["title"] == "smollm2-135m, auto, 6 tokens predicted"
    assert [row["figures"]["kl"][0] for row in drawn["rows"]] == [
        row["kl"] for row in found["rows"]
    ]


@pytest.mark.usefixtures("_model")
def test_eval_of_tasks(tmp_path):
    """What a run prints can be drawn later."""
    options = ("--context", "200", "--continuation", "2", "--tasks", "needle, variables")
    samples = tmp_path / "samples.jsonl"
    samples.write_text("old")
    files = ("--samples-file", str(samples), "--overwrite")
    result = run("eval", "--specs", "window:64", *options, "--samples", "2", *files, "--json")
    found = last_line(result)
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(row["spec"], row["task"]) for row in answers[-3:-1]] == [
        ("window:64", "needle"),
        ("window:64", "variables"),
    ]
    assert {(row["model"], row["dtype"]) for row in answers} == {("smollm2-135m", "auto")}
    (row,) = found["rows"]
    assert list(row["tasks"]) == ["needle", "variables"]
    for task in row["tasks"].values():
        assert task["samples"] == found["samples"] == 2
        assert 0 <= task["low"] <= task["accuracy"] <= task["high"] <= 1
    assert row["kl_95"][0] <= row["kl"] <= row["kl_95"][1]
    assert "variables" in result.stderr
    record, picture = tmp_path / "record.json", tmp_path / "quality.svg"
    record.write_text(result.stdout)
    old = json.loads(record.read_text().splitlines()[-1])
    for one in (*old["rows"], *old["baseline"]):  # as recorded before there were intervals
        del one["kl_95"], one["tasks"]
    (tmp_path / "old.json").write_text(json.dumps(old | {"model": "older"}))
    files = ("--recorded", str(record), "--recorded", str(tmp_path / "old.json"))
    page = tmp_path / "quality.html"
    assert run("eval", *files, "--plot", str(picture), "--html", str(page)).exit_code == 0
    drawn = picture.read_text()
    for text in ("accuracy, mean of tasks", "window:64", "older, auto, 200 tokens"):
        assert f"<!-- {text} -->" in drawn
    shown = data_of(page)
    assert shown["shown"] == ["kl", "accuracy"]
    assert [row["figures"]["accuracy"] is None for row in shown["rows"]] == [False] * 2 + [True] * 2
    assert [run["title"] for run in shown["runs"]] == ["smollm2-135m, auto", "older, auto"]


@pytest.mark.usefixtures("_model")
def test_eval_shows_the_full_cache_too():
    options = ("--context", "8", "--continuation", "2", "--no-retrieval")
    result = run("eval", "--specs", "window:4", *options)
    assert result.exit_code == 0
    assert "keep_all" in result.stdout
    assert "perplexity" in result.stdout


@pytest.mark.usefixtures("_model")
def test_eval_shows_which_tasks_were_skipped():
    options = ("--continuation", "2", "--samples", "1", "--tasks", "needle, common-words")
    result = run("eval", "--specs", "keep_all", "--context", "150,900", *options)
    assert result.exit_code == 0
    assert "skipped common-words: a context of 150 tokens" in " ".join(result.stderr.split())
    assert "900" in result.stdout


@pytest.mark.usefixtures("_model")
def test_inspect_json(tmp_path):
    picture = tmp_path / "kept.png"
    page = tmp_path / "kept.html"
    cache = ("--cache", "h2o:6,recent=2", "--plot", str(picture), "--html", str(page))
    found = last_line(run("inspect", PROMPT, *cache, "--json"))
    assert found["tokens"] == len(found["ids"]) > 6
    assert found["cache"] == "h2o:6,recent=2+plain@growing"
    assert [len(heads) for heads in found["layers"]] == [3] * LAYERS
    for heads in found["layers"]:
        for positions in heads:
            assert len(positions) == 6
            assert positions == sorted(set(positions))
            assert positions[-2:] == [found["tokens"] - 2, found["tokens"] - 1]
    assert any(heads[0] != heads[1] for heads in found["layers"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = data_of(page)
    (shown,) = data["pictures"]
    assert "".join(data["texts"]) == PROMPT
    assert [layer["kept"] for layer in shown["layers"]] == [[6] * 3] * LAYERS
    assert 0 < shown["live_bytes"] < shown["full_bytes"]


@pytest.mark.usefixtures("_model")
def test_inspect_shows_the_text_and_a_bar_for_each_head():
    options = ("--cache", "h2o:6,recent=2", "--layer", "1")
    shown = run("inspect", PROMPT, *options).stdout
    text = shown.partition("h2o:6")[0]
    assert "·" in text
    assert all(a in (b, "·") for a, b in zip(text.replace("\n", ""), PROMPT, strict=False))
    assert DOTTED in " ".join(shown.split())
    bars = [line.split()[:5] for line in shown.splitlines() if line.strip().startswith("layer")]
    assert bars == [["layer", "1", "head", str(head), "6"] for head in range(3)]
    one = run("inspect", "--context", "30", *options, "--head", "1").stdout
    assert one.count("layer 1 head 1") == one.count("layer") == 1
    alike = run("inspect", PROMPT, "--cache", "window:4", "--layer", "1").stdout
    assert "layer 1 all heads" in alike


def test_layers_of_a_hybrid_have_their_numbers_in_the_model(monkeypatch):
    model, tokenizer = model_of("lfm2"), finetune_inputs.tokenizer()
    monkeypatch.setattr("kvkeep.hf.models.load", lambda *_, **__: (model, tokenizer))
    types = model.config.layer_types
    places = [place for place, name in enumerate(types) if name == "full_attention"]
    options = ("inspect", "one two", "--cache", "window:4")
    found = last_line(run(*options, "--json"))
    assert found["places"] == places
    assert len(found["layers"]) == len(places)
    shown = run(*options, "--layer", str(places[-1])).stdout
    assert shown.count("layer") == shown.count(f"layer {places[-1]} ") == 1
    other = types.index("conv")
    refused = " ".join(run(*options, "--layer", str(other)).stderr.split())
    assert f"--layer {other}: the model has {len(places)} layers that attend; give" in refused


def test_bar():
    assert bar([0, 1, 2, 3], 4, 4) == "████"
    assert bar([], 4, 4) == "    "
    assert bar([0], 100, 4) == BARS[1] + "   "
    assert bar([3, 4], 5, 2) == " █"
    assert bar([4], 5, 2) == " ▄"
    assert bar([0, 1, 2, 3], 4, 4, ASCII_BARS) == "@@@@"
    assert len(ASCII_BARS) == len(BARS)


@pytest.mark.usefixtures("_model")
def test_inspect_in_a_terminal_that_is_not_utf8():
    result = CliRunner(charset="ascii").invoke(app, ["inspect", "one two", "--cache", "window:4"])
    assert result.exit_code == 0, result.output
    assert "@" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "--specs", "keep_all;windw:3"), "did you mean 'window'"),
        (("eval", "--specs", " ; "), "no spec"),
        (("eval", "--context", "20,x"), "whole numbers"),
        (("eval", "--text", "nowhere.txt"), "does not exist"),
        (("eval", "--plot", "x.foo"), "must end in ."),
        (("eval", "--model", "smollm2-135n"), "did you mean 'smollm2-135m'"),
        (("eval", "--context", "8000"), "the model holds 8192; use a context of at most 7936"),
        (("eval", "--windows", "99"), "fewer windows"),
        (("eval", "--tasks", "needle,sum"), "no task 'sum'; there is needle, multi-key"),
        (("eval", "--tasks", "longbench,sum"), "no task 'sum'; there is needle, multi-key"),
        (("eval", "--samples-file", __file__), "exists; give another name, or --overwrite"),
        (("eval", "--samples-file", "nowhere/x"), "there is no directory nowhere"),
        (("eval", "--no-retrieval", "--samples-file", "x"), "without tasks would stay empty"),
        (("eval", "--against", "vllm"), "there is kvpress and llama.cpp"),
        (("eval", "--against", "kvpress"), "needs --kvpress DIR"),
        (("eval", "--against", "kvpress", "--kvpress", "nowhere"), "no environment in nowhere"),
        (("eval", "--recorded", __file__), "needs --plot FILE or --html FILE"),
        (("eval", "--recorded", __file__, "--html", "x.html"), "no result of kvkeep eval --json"),
        (("eval", "--html", "x.htm"), "must end in .html"),
        (("inspect", "hello", "--html", "nowhere/x.html"), "nowhere/x.html cannot be written"),
        (("eval", "--recorded", __file__, "--plot", "x.svg"), "no result of kvkeep eval --json"),
        (("inspect", "hello", "--cache", "h2o"), "lacks 'tokens'"),
        (("inspect", "hello", "--context", "9"), "not both"),
        (("inspect", "hello", "--layer", str(LAYERS)), f"give 0..{LAYERS - 1}"),
        (("inspect", "hello", "--head", "3"), "give 0..2"),
        (("inspect", "--context", "9000"), "use a context of at most 8192"),
        (("inspect", "hello", "--plot", "nowhere/x.png"), "give a file in a writable directory"),
        (("inspect",), "give a prompt"),
    ],
)
@pytest.mark.usefixtures("_model")
def test_bad_input(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
