"""kvpress's side of a comparison, with a package of its name that stands in for it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from kvkeep_lab.evals import kvpress
from kvkeep_lab.evals.kvpress import Kvpress
from kvkeep_lab.evals.names import PRESSES
from kvkeep_lab.evals.run import evaluate
from support import tiny_models
from support.token_letters import Letters

from kvkeep.errors import SpecError, UnsupportedError

# As kvpress does it, a press cuts a layer's keys and values in a hook after its attention; one that
# keeps other pairs in each head leaves them and names those that it masks.
PACKAGE = """
from contextlib import contextmanager
import torch, transformers

SUPPORTED_MODELS = (transformers.LlamaForCausalLM,)

class Press:
    def __init__(self, removed):
        self.removed = removed

    @contextmanager
    def __call__(self, model):
        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [x.register_forward_hook(self.cut, with_kwargs=True) for x in layers]
        yield
        for hook in hooks:
            hook.remove()

    def cut(self, module, args, options, output):
        layer = (options.get("cache") or options["past_key_values"]).layers[module.layer_idx]
        kept = int(layer.keys.shape[2] * (1 - self.removed))
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]

class Masking(Press):
    def __init__(self, press):
        self.removed = press.removed

    def cut(self, module, args, options, output):
        keys = (options.get("cache") or options["past_key_values"]).layers[module.layer_idx].keys
        count = int(keys.shape[1] * keys.shape[2] * self.removed)
        module.masked_key_indices = (torch.zeros(count),) * 3

class Failing(Press):
    def cut(self, *args):
        raise ValueError("no attention")

SnapKVPress = PyramidKVPress = KnormPress = KeyDiffPress = StreamingLLMPress = TOVAPress = Press
ExpectedAttentionPress = KVzipPress = Press
ObservedAttentionPress = Failing
AdaKVPress = CriticalAdaKVPress = Masking
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An environment whose Python is this one, with the package above."""
    folder = tmp_path_factory.mktemp("kvpress")
    (folder / "kvpress.py").write_text(PACKAGE)
    about = folder / "kvpress-0.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 0.0\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); sys.argv = sys.argv[2:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def model(tmp_path):
    model = tiny_models.tiny("llama", max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    return model


def measured(model, place, presses, **options):
    options = {"contexts": [300], "continuation": 9, "tasks": ["needle"], "samples": 2} | options
    return evaluate(
        model, Letters(), ["snapkv:75"], windows=2, against=Kvpress(place, presses), **options
    )


@pytest.mark.slow  # two processes import transformers
def test_presses_beside_specs(model, place):
    said, samples = [], []
    found = measured(
        model,
        place,
        ["none", "knorm", "adakv", "observed_attention"],
        progress=lambda x, _: said.append(x),
        record=samples.append,
    )
    none, knorm, adakv, observed = found["against"]
    full = found["baseline"][0]
    assert found["late_question"]
    assert (none["spec"], knorm["context"]) == ("kvpress none", 300)
    for figure in ("perplexity", "perplexity_ratio", "top1", "retrieval", "retrieval_by_depth"):
        assert none[figure] == pytest.approx(full[figure], rel=1e-5)
    assert none["tasks"] == full["tasks"]
    assert none["kl"] == pytest.approx(0, abs=1e-8)
    whole = 2 * 2 * 2 * 300 * 8 * 4  # keys and values, layers, heads, tokens, width, float32
    assert (none["bytes"], none["kept"]) == (whole, 1)
    assert (knorm["bytes"], knorm["kept"]) == (whole / 4, 0.25)
    assert knorm["kl"] > 1e-6
    assert knorm["kl_95"][0] <= knorm["kl"] <= knorm["kl_95"][1]
    assert (adakv["bytes"], adakv["kept"]) == (whole, 0.25)
    assert none["tokens_per_s"] > 0
    assert none["versions"]["kvpress"] == "0.0"
    assert observed["failed"] == "ValueError: no attention"
    assert said[-1] == "kvpress observed_attention"
    own, uncompressed = (
        [row for row in samples if row["spec"] == spec] for spec in ("keep_all", "kvpress none")
    )
    assert uncompressed == [row | {"spec": "kvpress none"} for row in own]
    assert len(own) == 4


def test_what_cannot_be_compared_is_refused(model, place, tmp_path):
    for options, error, says in (
        ({"presses": ["knurm"]}, SpecError, "no press 'knurm'; there is none, snapkv"),
        ({"presses": []}, SpecError, "give some of none, snapkv"),
        ({"kept": 0.0}, SpecError, "a kept share of 0.0"),
        ({"place": tmp_path / "none"}, UnsupportedError, "python -m venv"),
    ):
        with pytest.raises(error, match=says):
            Kvpress(**({"place": place} | options))
    with pytest.raises(UnsupportedError, match="leave out --chunk"):
        measured(model, place, PRESSES, chunk=100)
    other = tiny_models.tiny("qwen2", max_position_embeddings=1024)
    with pytest.raises(UnsupportedError, match=r"config\.json"):
        measured(other, place, PRESSES)


@pytest.mark.slow
def test_a_model_that_kvpress_does_not_support(place, tmp_path):
    other = tiny_models.tiny("qwen2", max_position_embeddings=1024)
    other.save_pretrained(tmp_path)
    other.name_or_path = str(tmp_path)
    with pytest.raises(UnsupportedError, match="does not support Qwen2ForCausalLM; it supports"):
        measured(other, place, PRESSES)


def test_a_failed_command_says_why():
    code = "import sys; sys.exit('no space left')"
    with pytest.raises(UnsupportedError, match="kvpress: no space left"):
        kvpress._run([sys.executable, "-c", code])
    assert Path(kvpress._SCRIPT).is_file()
