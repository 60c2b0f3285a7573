"""What is said of a model without its weights, and downloads from the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from support import finetune_inputs, tiny_gguf

import kvkeep
from kvkeep.errors import SpecError
from kvkeep.hf import models
from kvkeep.hf.adapter_files import AdapterError
from kvkeep.hf.describe import describe
from kvkeep.hf.hub import HubError, download
from kvkeep.hf.models import ModelError, load, obtain


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a model with two types of layers, and its tokenizer."""
    directory = tmp_path_factory.mktemp("saved")
    finetune_inputs.model("gemma3").save_pretrained(directory)
    finetune_inputs.tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "window:4", "h2o:25%"])
def test_what_it_says_is_what_comes(saved, spec):
    bare = saved.parent / "bare"
    shutil.copytree(saved, bare, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    found = describe(str(bare), spec, "float32", "cpu")
    model, _ = load(str(saved), "float32", "cpu")
    assert found["parameters"] == model.num_parameters()
    assert (found["type"], found["class"]) == (model.config.model_type, type(model).__name__)
    assert sum(found["layers"].values()) == model.config.num_hidden_layers
    assert set(found["layers"]) == set(model.config.layer_types)
    assert found["context"] == 256
    assert (found["attention"], found["why"]) == ("kvkeep", None)
    with kvkeep.attach(model, spec):
        for tokens, name in ((1, "bytes_per_token"), (256, "bytes_at_context")):
            cache = kvkeep.Cache(model, spec)
            with torch.inference_mode():
                model(torch.arange(tokens)[None] % 90 + 3, past_key_values=cache)
            assert found[name] == cache.live_bytes


@pytest.mark.parametrize(
    ("kind", "attention", "why"),
    [
        ("Bloom", "its own", "AttentionInterface"),
        ("XLM", None, "gives no keys to its cache"),
        ("T5", None, ""),
    ],
)
def test_attention_that_is_not_kvkeeps(kind, attention, why, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    getattr(transformers, f"{kind}Config")(**sizes, vocab_size=98).save_pretrained(tmp_path)
    finetune_inputs.tokenizer().save_pretrained(tmp_path)
    if kind == "T5":  # transformers has no causal model of it
        with pytest.raises(ModelError, match="cannot read"):
            describe(str(tmp_path))
        return
    found = describe(str(tmp_path))
    assert found["attention"] == attention
    assert why in found["why"]
    assert found["layers"]


def test_adapters_files_and_errors(saved, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(saved)}))
    found = describe(str(adapter))
    assert (found["model"], found["base"]) == (str(adapter), str(saved))
    config.write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        describe(str(adapter))
    file = tiny_gguf.write(tmp_path / "a.gguf")
    assert describe(str(file))["class"] == type(load(str(file), "float32", "cpu")[0]).__name__
    refused = describe(str(saved), "h2o:9+kivi")
    assert refused["bytes_per_token"] is None
    assert refused["no_cache"]
    with pytest.raises(SpecError, match="did you mean 'window'"):
        describe(str(saved), "windw:3")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelError, match="run `kvkeep models fetch smollm2-135m`"):
        describe("smollm2-135m")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nothing"}')
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        describe(str(tmp_path / "odd"))


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """A stand-in for the hub, which has one repository; returns what was asked for."""
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns, tqdm_class):
        asked.append((name, allow_patterns, ignore_patterns))
        bar = tqdm_class(total=100, unit="B")
        bar.update(25)
        bar.update(75)
        return str(saved)

    def list_repo_files(name):
        if name != "owner/name":
            raise OSError("401 Client Error.\nRepository Not Found")
        return files

    files = [path.name for path in Path(saved).iterdir()] + ["pytorch_model.bin", "onnx/a.onnx"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked, files


def test_a_hub_name_is_downloaded(hub, saved, capsys):
    asked, files = hub
    said = []
    assert obtain("owner/name", lambda *one: said.append(one)) == saved
    assert said == [("downloading owner/name", share) for share in (None, 0.25, 1.0)]
    ((name, allowed, ignored),) = asked
    assert (name, ignored) == ("owner/name", ["*/*"])
    assert "*.safetensors" in allowed
    assert "*.bin" not in allowed
    assert capsys.readouterr() == ("", "")
    files[:] = ["config.json", "pytorch_model.bin"]
    download("owner/name")
    assert "*.bin" in asked[-1][1]
    files[:] = ["model.gguf"]
    with pytest.raises(HubError, match="download a GGUF file of it"):
        download("owner/name")
    with pytest.raises(HubError, match=r"cannot download owner/other: 401 .* Not Found; check the"):
        download("owner/other")


def test_a_directory_is_checked(saved, tmp_path):
    assert obtain(str(saved)) == saved
    bare = tmp_path / "bare"
    shutil.copytree(saved, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="no weights in"):
        obtain(str(bare))
    shutil.rmtree(bare)
    with pytest.raises(ModelError, match=f"did you mean '{saved}'"):
        models.resolve(f"{saved}x")
