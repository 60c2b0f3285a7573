"""The tool that runs transformers' tests with every model attached, on tests of three lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, T5Config, T5Model

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)

class TestOddModelTest:
    def test_generates(self):
        config = LlamaConfig(**SIZES, num_attention_heads=2)
        for _ in range(2):  # of one config
            model = LlamaForCausalLM(config).eval()
            out = model.generate(torch.ones(1, 3, dtype=int), max_new_tokens=2)
        assert out.shape == (1, 5)

    def test_generates_with_a_cache_of_a_type(self):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).eval()
        with torch.no_grad():
            assert isinstance(model(torch.ones(1, 3, dtype=int)).past_key_values, DynamicCache)

    def test_generates_nothing(self):
        config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        model, ids = T5Model(config), torch.ones(1, 3, dtype=int)
        assert model(input_ids=ids, decoder_input_ids=ids).last_hidden_state.shape == (1, 3, 16)

    def test_generates_in_vain(self):
        raise AssertionError
"""


@pytest.mark.slow
def test_report(tmp_path):
    folder = tmp_path / "tests" / "models" / "odd"
    folder.mkdir(parents=True)
    (folder / "test_modeling_odd.py").write_text(TESTS)
    tool = Path(__file__).parents[1] / "support" / "transformers_tests.py"
    done = subprocess.run(
        [sys.executable, tool, tmp_path, "--families", "odd"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[2] == "| odd | 4 | 3 | 2 | 2 |"
    assert lines[3].startswith("TestOddModelTest::test_generates_with_a_cache_of_a_type (odd): ")
    assert lines[4].startswith("T5Model (odd) is not attached: ")
    assert len(lines) == 5
