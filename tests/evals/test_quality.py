"""What an evaluation says is held to a plain forward without a cache, and to the cache itself."""

from __future__ import annotations

import math

import pytest
import torch
from kvkeep_lab.bench.text import windows_of_text
from kvkeep_lab.evals.kept_positions import fed, kept, prompt_ids, shares
from kvkeep_lab.evals.quality import compare
from kvkeep_lab.evals.run import TIMED_STEPS, evaluate
from support import tiny_models
from support.token_letters import Letters
from torch.nn.functional import cross_entropy

import kvkeep
from kvkeep.errors import CapacityError, ShapeError, SpecError

CONTEXT, CONTINUATION = 40, 9


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return tiny_models.tiny(request.param)


def measured(model, *specs, **options):
    options = {"contexts": [CONTEXT], "continuation": CONTINUATION, "tasks": ()} | options
    return evaluate(model, Letters(), specs, **options)


@torch.inference_mode()
def test_the_full_cache_is_a_plain_forward(model):
    result = measured(model, "keep_all", "keep_all@fixed", windows=3)
    ids = windows_of_text(Letters(), 3, CONTEXT + CONTINUATION)
    logits = model(ids, use_cache=False).logits[:, CONTEXT - 1 : -1]
    right = math.exp(cross_entropy(logits.flatten(0, 1), ids[:, CONTEXT:].flatten()))
    assert result["baseline"][0]["perplexity"] == pytest.approx(right, rel=1e-4)
    assert result["rows"][0] == result["baseline"][0]
    for row in result["rows"]:
        assert row["perplexity"] == pytest.approx(right, rel=1e-4)
        assert row["perplexity_ratio"] == pytest.approx(1, rel=1e-4)
        assert (row["kl"], row["top1"]) == (pytest.approx(0, abs=1e-9), 1.0)
        assert (row["context"], row["retrieval"]) == (CONTEXT, None)
        assert row["tokens_per_s"] > 0
    assert result["rows"][0]["kl"] == 0


def test_what_a_spec_loses_and_saves(model):
    specs = ("keep_all+int8", "window:4", "h2o:8,recent=2", "window:4@fixed")
    rows = {row["spec"]: row for row in measured(model, *specs)["rows"]}
    assert list(rows) == list(specs)
    assert 0 < rows["keep_all+int8"]["kl"] < rows["window:4"]["kl"]
    assert rows["window:4"]["top1"] < 1
    for spec, row in rows.items():
        cache = kvkeep.Cache(model, spec)
        with kvkeep.attach(model), torch.inference_mode():
            ids = windows_of_text(Letters(), 1, CONTEXT + CONTINUATION)[:, :CONTEXT]
            model(ids, past_key_values=cache)
        assert row["bytes"] == cache.live_bytes
        assert row["allocated"] >= row["bytes"]
    assert rows["window:4@fixed"]["kl"] == pytest.approx(rows["window:4"]["kl"], rel=1e-4)


def test_a_context_that_is_read_once(model):
    """Only what a full cache reads alike begins with its slots: not `int8` or `h2o`."""
    codes = "int4:recent=8"
    specs = (f"keep_all+{codes}", f"kvzip:50%+{codes}", f"h2o:16,recent=4+{codes}", "keep_all+int8")
    once, each = (
        measured(model, *specs, windows=2, read_once=read_once)["rows"]
        for read_once in (True, False)
    )
    for one, other in zip(once, each, strict=True):
        assert one["kl"] == pytest.approx(other["kl"], rel=0.05) != 0
        assert one["bytes"] == other["bytes"]


@torch.inference_mode()
def test_a_window_is_teacher_forced_through_its_cache():
    model = tiny_models.tiny("llama")
    (row,) = measured(model, "window:4")["rows"]
    mistral = tiny_models.tiny("mistral", sliding_window=4)
    mistral.load_state_dict(model.state_dict())
    ids = windows_of_text(Letters(), 1, CONTEXT + CONTINUATION)
    logits = mistral(ids, use_cache=False).logits[0, CONTEXT - 1 : -1]
    full = model(ids, use_cache=False).logits[0, CONTEXT - 1 : -1]
    assert row["perplexity"] == pytest.approx(
        math.exp(cross_entropy(logits, ids[0, CONTEXT:])), rel=1e-4
    )
    p, q = (torch.log_softmax(x.double(), -1) for x in (full, logits))
    assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert row["top1"] == float((full.argmax(-1) == logits.argmax(-1)).float().mean())


def test_a_chunked_context_evicts_on_the_way():
    model = tiny_models.tiny("llama")
    at_once, in_chunks = (
        measured(model, "h2o:8,recent=2", "window:4", chunk=chunk)["rows"] for chunk in (None, 8)
    )
    assert at_once[0]["kl"] != pytest.approx(in_chunks[0]["kl"], rel=1e-3)
    assert at_once[1]["kl"] == pytest.approx(in_chunks[1]["kl"], rel=1e-4)


def test_windows_are_averaged_as_rows():
    model = tiny_models.tiny("llama")
    result = measured(model, "random:8", windows=2)
    ids = windows_of_text(Letters(), 2, CONTEXT + CONTINUATION)
    assert not ids[0].equal(ids[1])
    alone = measured(model, "random:8")
    assert result["rows"][0]["bytes"] == alone["rows"][0]["bytes"]
    assert result["rows"][0]["kl"] != alone["rows"][0]["kl"]


def test_compare_counts_tokens_and_rows():
    full = [torch.tensor([[0.0, 0.0], [0.0, -torch.inf]])]
    mine = [torch.tensor([[0.0, math.log(3)], [0.0, -torch.inf]])]
    found = compare(mine, full, torch.tensor([[1], [0]]))
    assert found.perplexity == pytest.approx((4 / 3) ** 0.5)
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found.top1 == 0.5


def test_progress_ends_at_one(model):
    seen = []
    measured(model, "window:4", progress=lambda doing, share: seen.append((doing, share)))
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    assert seen[-1][1] == pytest.approx(1)
    assert any("window:4" in doing for doing, _ in seen)


@pytest.mark.parametrize(
    ("specs", "options", "error", "says"),
    [
        ((), {}, SpecError, "no spec"),
        (("windw:4",), {}, SpecError, "did you mean 'window'"),
        (("keep_all@fixed:30",), {}, CapacityError, "30"),
        ((), {"contexts": [0]}, SpecError, "no spec"),
        (("keep_all",), {"contexts": [0]}, ShapeError, "at least 1"),
        (("keep_all",), {"contexts": [9, 120]}, ShapeError, f"at most {128 - TIMED_STEPS}"),
        (("keep_all",), {"windows": 10**6}, ShapeError, "fewer windows"),
        (("keep_all",), {"tasks": ["needle"]}, ShapeError, "leave the task out"),
        (("keep_all",), {"tasks": ["qa", "sum"]}, SpecError, "no task 'sum'"),
    ],
)
def test_what_cannot_be_measured_is_refused(specs, options, error, says):
    with pytest.raises(error, match=says):
        measured(tiny_models.tiny("llama"), *specs, **options)


def test_windows_of_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij" * 2)
    ids = windows_of_text(Letters(first=[0]), 2, 4, file)
    assert [Letters().decode(row) for row in ids.tolist()] == ["def", "def"]
    assert ids[:, 0].tolist() == [0, 0]
    with pytest.raises(ShapeError, match="the text has 20"):
        windows_of_text(Letters(), 2, 11, file)
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ShapeError, match="not UTF-8"):
        windows_of_text(Letters(), 1, 2, file)


def test_kept(model):
    ids = torch.randint(1, 96, (1, 30))
    for spec in ("keep_all", "window:4,sinks=1", "h2o:8,recent=2", "tova:8"):
        layers = kept(fed(model, ids, spec))
        cache = kvkeep.Cache(model, spec)
        with kvkeep.attach(model), torch.inference_mode():
            model(ids, past_key_values=cache)
        assert len(layers) == len(cache.layers)
        for mine, layer in zip(layers, cache.layers, strict=True):
            assert len(mine) == 2
            assert all(len(head) == layer.length for head in mine)
            assert all(head == sorted(set(head)) for head in mine)
            assert all(0 <= head[0] <= head[-1] < 30 for head in mine)
            if spec.startswith("window"):
                newest = 30 - min(4, layer.window or 4)
                assert all(head[-4:] == [*range(newest, 30)] for head in mine)
    assert shares([[0, 2], [2]], 4) == [0.5, 0, 1, 0]
    assert prompt_ids(model, Letters(), "abc").shape == (1, 3)
    assert prompt_ids(model, Letters(), "", 128).shape == (1, 128)
    with pytest.raises(ShapeError, match="at most 128"):
        prompt_ids(model, Letters(), "", 129)
    assert kvkeep.Cache(model).layers[0].positions().shape == (0, 1, 0)
