"""Names of models, and models in GGUF files."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
from support import tiny_gguf
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.errors import MissingPackageError, ModelError
from kvkeep.hf import models
from kvkeep.named_models import installed


def test_names(home, tmp_path):
    assert models.resolve(str(tmp_path)) == str(tmp_path)
    assert models.resolve("owner/name") == "owner/name"
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        models.resolve("smolm2-135m")
    with pytest.raises(ModelError, match="known: gemma3-270m, smollm2-135m"):
        models.resolve("/no/such/place")
    for name in ("x" * 300, "x" * 300 + ".gguf"):
        with pytest.raises(ModelError, match="too long"):
            models.resolve(name)


def test_short_names_without_the_package_that_declares_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "installed", dict)
    with pytest.raises(MissingPackageError, match="of kvkeep-lab; pip install kvkeep-lab, or give"):
        models.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        models.resolve("smolm2-135m")
    assert models.resolve("owner/smollm2-135m") == "owner/smollm2-135m"
    (tmp_path / "smollm2-135m").mkdir()
    assert models.resolve("smollm2-135m") == "smollm2-135m"


@pytest.mark.parametrize("loads", [True, False])
def test_short_names_of_a_package(tmp_path, monkeypatch, loads):
    class Tiny:
        """As a package declares it."""

        def fetch(self, progress):
            progress("fetching", 1.0)
            return tmp_path / "tiny"

    package = tmp_path / "tiny_package.py"
    package.write_text("TINY = None" if loads else "raise ImportError('no libtiny')")
    info = tmp_path / "tiny_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvkeep.models]\ntiny = tiny_package:TINY\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        if not loads:
            with pytest.raises(MissingPackageError, match=r"'tiny'.*no libtiny; repair"):
                models.resolve("tiny")
            return
        import_module("tiny_package").TINY = Tiny()
        said = []
        assert models.resolve("tiny", lambda *one: said.append(one)) == str(tmp_path / "tiny")
        assert said == [("fetching", 1.0)]
        assert {"tiny", "smollm2-135m"} <= installed().keys()
    finally:
        sys.modules.pop("tiny_package", None)


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
