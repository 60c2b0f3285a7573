"""`kvkeep bench train`: what it measures, and the reference it compares gradients with."""

from __future__ import annotations

import json
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from kvkeep_lab.bench import train
from kvkeep_lab.bench.options import Train
from kvkeep_lab.bench.resident import bounded, is_out_of_memory
from kvkeep_lab.bench.text import tokens_of_text
from kvkeep_lab.cli.plot import plot
from support.short_tokenizer import SIZE, short_tokenizer
from support.tiny_models import tiny
from transformers import AutoTokenizer
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app
from kvkeep.cli.output import print_table

COLUMNS = [
    "method",
    "processes",
    "tokens",
    "peak_bytes",
    "seconds",
    "grad_rel_error",
    "offloaded_bytes",
]

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads Linux's counters"
)


def saved(folder, vocabulary):
    tiny("llama", vocab_size=vocabulary, attention_dropout=0.5).save_pretrained(folder)
    short_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny model."""
    return saved(tmp_path_factory.mktemp("tiny"), SIZE)


@pytest.fixture(scope="module")
def text(model):
    return tokens_of_text(AutoTokenizer.from_pretrained(model), 2000)


@pytest.fixture
def _here(monkeypatch, one_thread, text):
    """Processes of their own, which import and tokenise for seconds, are not started."""
    monkeypatch.setattr(train, "tokens_of_text", lambda _, count: text[:, :count])
    monkeypatch.setattr(train, "together", lambda calls: [call() for call in calls])


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "train", *arguments])


def require_complete(rows):
    for row in rows:
        assert list(row) == COLUMNS
        assert row["peak_bytes"] > 0
        assert row["seconds"] > 0
        if row["method"] == "kvkeep":
            assert 0 <= row["grad_rel_error"] < 1e-5
            assert row["offloaded_bytes"] > 0
        else:
            assert (row["grad_rel_error"], row["offloaded_bytes"]) == (None, 0)


def require_null(row):
    assert list(row) == COLUMNS
    assert [row[name] for name in ("peak_bytes", "seconds", "grad_rel_error")] == [None] * 3
    assert row["offloaded_bytes"] == (None if row["method"] == "kvkeep" else 0)


@pytest.mark.usefixtures("_here")
def test_rows(model):
    doing, shares = [], []

    def progress(what, share):
        doing.append(what)
        shares.append(share)

    result = train.run(Train(model, tokens=(24, 48), cache="h2o:16", chunk=16), progress)
    assert [(row["tokens"], row["method"]) for row in result["rows"]] == [
        (tokens, method) for tokens in (24, 48) for method in train.METHODS
    ]
    require_complete(result["rows"])
    assert doing.count("reference, 48 tokens") == 1
    assert shares == sorted(shares)
    json.dumps(result)


@pytest.mark.usefixtures("_here")
def test_rows_of_litgpt(model):
    pytest.importorskip("litgpt")
    options = {"tokens": (48,), "cache": "h2o:16", "chunk": 16}
    result = train.run(Train(model, host="litgpt", **options))
    assert result["host"] == "litgpt"
    assert [row["method"] for row in result["rows"]] == list(train.METHODS)
    require_complete(result["rows"])
    with pytest.raises(kvkeep.SpecError, match="no host 'jax'"):
        train.run(Train(model, host="jax", **options))


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_no_check(model):
    rows = train.run(Train(model, tokens=(48,), cache="h2o:16", chunk=16, check=False))["rows"]
    assert [row["grad_rel_error"] for row in rows] == [None] * 3
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_what_does_not_fit(tmp_path):
    """Logits of 1500 tokens are 280 MiB, and there are several; kvkeep computes some at a time."""
    model = saved(tmp_path, 49152)
    options = {"tokens": (1500,), "cache": "keep_all", "chunk": 128}
    ours, *others = train.run(Train(model, memory=400 << 20, **options))["rows"]
    require_complete([ours])
    for row in others:
        require_null(row)


@pytest.mark.usefixtures("_here")
def test_a_process_that_was_ended(monkeypatch):
    def end(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(train, "together", end)
    rows = train.run(Train("none", tokens=(48,)))["rows"]
    assert len(rows) == 3
    for row in rows:
        require_null(row)


def test_a_bound():
    with bounded(64 << 20):
        torch.ones(1 << 20)
        with pytest.raises(RuntimeError) as failure:
            torch.ones(1 << 28)
    assert is_out_of_memory(failure.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    torch.empty(1 << 28)


@pytest.mark.slow
def test_a_command(model, tmp_path):
    picture = tmp_path / "train.png"
    options = ("--model", model, "--tokens", "48", "--cache", "h2o:16", "--chunk", "16")
    result = invoke(*options, "--methods", "kvkeep", "--no-check", "--plot", str(picture), "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert list(row) == COLUMNS
    assert row["peak_bytes"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_process_for_each(model):
    options = ("--model", model, "--tokens", "48,96", "--cache", "h2o:16", "--chunk", "16")
    result = invoke(*options, "--json")
    assert result.exit_code == 0, result.output
    require_complete(json.loads(result.stdout.splitlines()[-1])["rows"])


@pytest.mark.slow
def test_processes_that_share_a_text(model):
    options = ("--model", model, "--tokens", "480", "--cache", "h2o:16", "--chunk", "16")
    result = invoke(*options, "--methods", "kvkeep", "--processes", "2,1", "--json")
    assert result.exit_code == 0, result.output
    two, one = json.loads(result.stdout.splitlines()[-1])["rows"]
    require_complete([two, one])
    assert (two["processes"], one["processes"]) == (2, 1)
    assert two["offloaded_bytes"] < 0.7 * one["offloaded_bytes"]


@pytest.mark.slow
def test_a_process_that_does_not_fit(model):
    options = {"tokens": (1500,), "cache": "keep_all", "chunk": 128, "memory": 400 << 20}
    ours, *others = train.run(Train(model, **options))["rows"]
    require_complete([ours])
    for row in others:
        require_null(row)


@pytest.mark.parametrize("lengths", [(48,), (48, 96)])
def test_gaps(tmp_path, capsys, lengths):
    names = ("peak_bytes", "seconds")
    rows = [
        {"method": "kvkeep", "tokens": length} | dict.fromkeys(names, 1.5) for length in lengths
    ]
    rows += [{"method": "backprop", "tokens": length} | dict.fromkeys(names) for length in lengths]
    plot("Gaps", {"": rows}, tmp_path / "gaps.svg")
    plot("Nothing", {"": rows[len(lengths) :]}, tmp_path / "nothing.svg")
    assert (tmp_path / "gaps.svg").exists()
    print_table("Gaps", rows)
    assert "None" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", "8,x"), "whole numbers"),
        (("--tokens", "1"), "whole numbers of at least 2"),
        (("--methods", "kvkeep,adjoint"), "no method 'adjoint'"),
        (("--methods", ","), "--methods is empty"),
        (("--processes", "1,0"), "whole numbers of at least 1"),
        (("--cache", "h3o:5"), "did you mean 'h2o'"),
        (("--plot", "x.foo"), "must end in ."),
    ],
)
def test_bad_input(arguments, says):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())
