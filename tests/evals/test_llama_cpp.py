"""llama.cpp's side of a comparison, if it is installed."""

from __future__ import annotations

import pytest
from kvkeep_lab.evals.llama_cpp import LlamaCpp
from kvkeep_lab.evals.run import evaluate
from support import tiny_models
from support.token_letters import Letters


def test_caches_of_fewer_bits_lose_more():
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_models.tiny("llama", **sizes)
    found = evaluate(
        model, Letters(), ["keep_all"], contexts=[100], continuation=9, windows=2, tasks=[],
        against=LlamaCpp(),
    )  # fmt: skip
    rows = found["against"]
    assert [row["spec"] for row in rows] == [
        "llama.cpp float32", "llama.cpp q8_0", "llama.cpp q5_1", "llama.cpp q4_0"
    ]  # fmt: skip
    losses = [row["kl"] for row in rows]
    assert losses == sorted(losses)
    assert losses[0] < losses[1] / 10  # kernels and roundings
    full = found["baseline"][0]
    elements = 2 * 100 * model.config.num_hidden_layers * 32
    assert [row["bytes"] for row in rows] == [elements * size // 32 for size in (128, 34, 24, 18)]
    assert rows[0]["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
