"""`kvkeep bench serve`, as a user calls it."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from kvkeep.cli.app import app

SIZES = ("--model", "random-tiny", "--dtype", "float32", "--device", "cpu", "--sequences", "2")
PROMPTS = ("--shortest", "8", "--longest", "24", "--repeats", "1")


def rows(*arguments):
    result = CliRunner().invoke(app, ["bench", "serve", *SIZES, *PROMPTS, *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])["rows"]


def test_all_systems_give_the_same_tokens():
    against = "kvkeep alone,transformers padded,transformers generate_batch"
    if find_spec("llama_cpp"):
        against += ",llama.cpp"
    found = rows("--against", against, "--new-tokens", "5", "--rate", "50")
    names = ["kvkeep", *against.split(",")]
    without = [name for name in names if name != "transformers padded"]
    assert [row["system"] for row in found] == names + without
    assert [row["arrivals"] for row in found] == ["at once"] * len(names) + ["poisson"] * len(
        without
    )
    for row in found:
        if row["system"] == "transformers generate_batch" and row.get("skipped"):
            continue  # it does not run everywhere
        assert row["agreement"] == 1, row
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
        assert 0 < row["gap_p95_s"] <= row["gap_max_s"]
    alone, together = found[1]["bytes"], found[0]["bytes"]
    assert alone < together


def test_a_shared_prefix_is_held_once():
    (together,) = rows("--arrivals", "at once", "--against", "", "--shared-prefix", "128")
    (apart,) = rows("--arrivals", "at once", "--against", "")
    prefix = 128 * _token_bytes(apart)
    assert together["bytes"] == pytest.approx(apart["bytes"] + prefix, rel=0.1)


def _token_bytes(row):
    prompts = 2 * (8 + 16 * 13 / 32)
    return row["bytes"] / (prompts + 2 * 64)


def test_other_measurements():
    (row,) = rows("--cpu-time")
    assert row["cpu_ms_per_step"] > 0
    assert row["tokens_held"] == 2 * (8 + 16 * 13 / 32)
    (row,) = rows("--interrupt", "300")
    assert row["prompt"] == 300
    assert 0 < row["gap_p95_s"] <= row["gap_max_s"]
    assert 0 < row["interrupted_gap_p95_s"] <= row["ttft_s"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--against", "vllm"), "no system 'vllm'"),
        (("--arrivals", "later"), "no arrivals 'later'"),
        (("--arrivals", "poisson"), "needs a rate"),
        (("--shortest", "30"), "at most"),
        (("--cpu-time", "--interrupt", "9"), "exclude each other"),
        (("--cpu-time", "--against", "kvkeep alone"), "no steps of 'kvkeep alone'"),
        (("--http",), "has a tokenizer"),
    ],
)
def test_bad_input(arguments, says):
    result = CliRunner().invoke(app, ["bench", "serve", *SIZES, *PROMPTS, *arguments])
    assert result.exit_code
    assert says in " ".join(result.output.split())
