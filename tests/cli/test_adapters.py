"""Adapters, and specs for layer types, as a user gives them on the command line."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import command_line, finetune_inputs
from support.command_line import last_line
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.errors import KVKeepError
from kvkeep.hf import session
from kvkeep.hf.loading.adapter_files import AdapterError, is_adapter
from kvkeep.hf.models import load

pytestmark = pytest.mark.usefixtures("one_thread")

BRIEF = ("--max-new-tokens", "6", "--json")


def run(*arguments, code=0, **options):
    result = command_line.run(*arguments, **options)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """What `kvkeep finetune` wrote for it."""
    place = tmp_path_factory.mktemp("tuned")
    data = finetune_inputs.write(place / "texts.jsonl", *finetune_inputs.texts())
    options = ("--model", base, "--length", 32, "--lr", 0.1, "--steps", 3, "--rank", 4)
    run("finetune", data, "--out", place / "out", "--cache", "h2o:16", *options)
    return place / "out"


def test_generate(base, adapter):
    plain = last_line(run("generate", "Hi", "--model", base, *BRIEF))
    given = (
        ("--adapter", adapter),
        ("--model", adapter),
        ("--model", base, "--adapter", adapter),
        ("--model", adapter / "checkpoint-3"),
    )
    found = [last_line(run("generate", "Hi", *options, *BRIEF)) for options in given]
    assert len({one["text"] for one in found}) == 1
    assert found[0]["text"] != plain["text"]
    assert [(one["model"], one["adapter"]) for one in found[:2]] == [
        (None, str(adapter)),
        (str(adapter), None),
    ]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    prompt = finetune_inputs.tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    wanted = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    new = wanted[0, prompt["input_ids"].shape[1] :]
    text = finetune_inputs.tokenizer().decode(new, skip_special_tokens=True)
    assert found[0]["text"] == text
    loaded, _ = load(str(adapter), "float32", "cpu")
    assert kvkeep.fingerprint(loaded) == kvkeep.fingerprint(model)


def test_eval_gives_the_loss_of_the_adapter(base, adapter, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("3 and 4 make 7. " * 8)
    options = ("--context", 40, "--continuation", 20, "--text", text, "--no-retrieval", "--json")
    rows = [
        last_line(run("eval", "--specs", "keep_all", *model, *options))["rows"][0]
        for model in (("--model", base), ("--adapter", adapter))
    ]
    assert rows[1]["perplexity"] < 0.9 * rows[0]["perplexity"]


@pytest.mark.slow
def test_eval_with_and_without_the_adapter_gives_samples_to_compare(base, adapter, tmp_path):
    config = json.loads((base / "config.json").read_text())
    longer = tmp_path / "longer"
    shutil.copytree(base, longer)
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    specs = ("--specs", "window:64", "--context", 500, "--continuation", 2)
    options = (*specs, "--tasks", "key-value", "--samples", 2, "--json")
    by_prompt = []
    for name, given in (("plain", ()), ("tuned", ("--adapter", adapter))):
        file = tmp_path / f"{name}.jsonl"
        result = last_line(run("eval", "--model", longer, *given, "--samples-file", file, *options))
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        by_prompt.append({tuple(map(row.get, ("spec", "task", "sample"))): row for row in rows})
        assert {(row["model"], row["adapter"]) for row in rows} == {
            (str(longer), str(adapter) if given else None)
        }
        assert result["rows"][0]["tasks"]["key-value"]["samples"] == 2
    plain, tuned = by_prompt
    assert len(plain) == 4
    assert plain.keys() == tuned.keys()
    for key, one in plain.items():
        for same in ("context", "seed", "depth", "tokens", "expected", "metric"):
            assert one[same] == tuned[key][same]
    assert any(one["generated"] != tuned[key]["generated"] for key, one in plain.items())


@pytest.mark.slow
def test_inspect_and_export(adapter, tmp_path):
    result = last_line(run("inspect", "Hello there", "--adapter", adapter, "--json"))
    assert (result["model"], result["adapter"]) == (None, str(adapter))
    options = ("--adapter", adapter, "--cache", "keep_all@fixed:64", "--json")
    assert last_line(run("export", tmp_path / "a.pt2", *options))["adapter"] == str(adapter)
    program = kvkeep.Program.load(tmp_path / "a.pt2")
    assert program.header.fingerprint["adapter"] != "none"


def test_chat(base, adapter, tmp_path, monkeypatch):
    """A session knows its adapter, and is refused without it."""
    monkeypatch.setattr(session, "home", lambda: tmp_path)
    brief = ("--session", "a", "--max-new-tokens", 3)
    run("chat", "--adapter", adapter, *brief, input="Hi\n")
    (row,) = last_line(run("sessions", "--json"))["sessions"]
    assert row["model"] == str(adapter)
    again = run("chat", *brief, input="Who?\n/hlep\n/xyz of\n")
    assert "no command /hlep; did you mean /help?" in again.stderr
    assert "no command /xyz; /help lists commands" in again.stderr
    assert last_line(run("sessions", "--json"))["sessions"][0]["turns"] == 2
    refused = run("chat", "--model", base, *brief, code=2)
    assert "adapter differs" in refused.stderr


def test_serve(adapter, monkeypatch):
    served = []
    monkeypatch.setattr(
        "kvkeep.serve.http.listen.run", lambda app, bound, stop, **_: served.append(stop.__self__)
    )
    run("serve", "--adapter", adapter, "--port", 0)
    (engine,) = served
    engine.close()
    assert engine.name == str(adapter)
    assert kvkeep.fingerprint(engine.model)["adapter"] != "none"


def broken(adapter, tmp_path, how):
    place = tmp_path / "broken"
    shutil.copytree(adapter, place)
    weights, config = place / "adapter_model.safetensors", place / "adapter_config.json"
    said = json.loads(config.read_text())
    tensors = load_file(weights)
    if how == "no weights":
        weights.unlink()
    elif how == "no config":
        config.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "no base":
        config.write_text(json.dumps(said | {"base_model_name_or_path": None}))
    elif how == "aLoRA":
        config.write_text(json.dumps(said | {"alora_invocation_tokens": [1, 2]}))
    elif how == "missing":
        save_file(dict(list(tensors.items())[1:]), weights)
    elif how == "odd":
        name, x = next(iter(tensors.items()))
        save_file(tensors | {name.replace("layers.0", "layers.7"): x.clone()}, weights)
    elif how == "wide":
        name, x = next(iter(tensors.items()))
        save_file(tensors | {name: torch.cat([x, x], dim=1)}, weights)
    elif how == "torn":
        weights.write_bytes(b"{}")
    return place


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no weights", "save the adapter as safetensors"),
        ("no config", "has no adapter_config.json; give a directory that"),
        ("no JSON", "adapter_config.json cannot be read"),
        ("no base", "does not say which model it is for; give one"),
        ("aLoRA", "needs a store"),
        ("missing", "1 weights are missing, 0 belong to no layer"),
        ("odd", "0 weights are missing, 1 belong to no layer"),
        ("wide", "size mismatch"),
        ("torn", "cannot load"),
    ],
)
def test_bad_adapters(adapter, tmp_path, how, says):
    place = broken(adapter, tmp_path, how)
    with pytest.raises(KVKeepError, match=says):
        load(None, "float32", "cpu", adapter=str(place))


@pytest.mark.parametrize(
    "odd",
    [
        {"rank_pattern": [1]},
        {"alpha_pattern": "x"},
        {"bias": 4},
        {"init_lora_weights": 7},
        {"target_modules": "(["},
        {"exclude_modules": "(["},
        {"rank_pattern": {"(": 1}},
    ],
    ids=lambda odd: json.dumps(odd)[:30],
)
def test_odd_values_in_an_adapters_config(adapter, tmp_path, odd):
    place = broken(adapter, tmp_path, "odd config")
    config = place / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | odd))
    with pytest.raises(AdapterError, match="cannot load"):
        load(None, "float32", "cpu", adapter=str(place))


def test_names_that_are_too_long_for_an_adapters():
    assert not is_adapter("x" * 300)
    with pytest.raises(AdapterError, match="cannot be read"):
        load(None, adapter="x" * 300)


def test_two_adapters(base, adapter, tmp_path):
    refused = run("generate", "Hi", "--model", adapter, "--adapter", adapter, code=2)
    assert "give one of them" in refused.stderr
    data = finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())
    options = ("--out", tmp_path / "out", "--length", 32, "--steps", 1)
    refused = run("finetune", data, "--model", adapter, *options, code=2)
    assert "already has an adapter" in refused.stderr


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model with two types of layers."""
    directory = tmp_path_factory.mktemp("mixed")
    finetune_inputs.model("gemma3").save_pretrained(directory)
    finetune_inputs.tokenizer().save_pretrained(directory)
    return directory


FULL = "full_attention=keep_all+plain@growing"
MIXED = FULL + ";sliding_attention=window:6+int8@growing"


def test_a_spec_for_each_type_of_layer(mixed, tmp_path, monkeypatch):
    where, cache = ("--model", mixed), ("--cache", MIXED)
    result = last_line(run("generate", "Hello", *where, *cache, *BRIEF))
    assert result["cache"] == MIXED
    layers = last_line(run("inspect", "Hello there, you", *where, *cache, "--json"))["layers"]
    assert [len(heads[0]) for heads in layers] == [6, 16]
    text = tmp_path / "text.txt"
    text.write_text("3 and 4 make 7. " * 8)
    specs = f"keep_all;{MIXED};full_attention=h2o:8;sliding_attention=keep_all"
    options = ("--context", 40, "--continuation", 20, "--text", text, "--no-retrieval", "--json")
    rows = last_line(run("eval", "--specs", specs, *where, *options))["rows"]
    assert [row["spec"] for row in rows] == [
        *("keep_all", MIXED, "full_attention=h2o:8;sliding_attention=keep_all")
    ]
    assert rows[0]["kl"] == 0 < rows[1]["kl"]
    fixed = MIXED.replace("growing", "fixed:64")
    program = run("export", tmp_path / "a.pt2", *where, "--cache", fixed, "--json")
    assert last_line(program)["cache"] == fixed
    monkeypatch.setattr(session, "home", lambda: tmp_path)
    brief = ("--session", "a", "--max-new-tokens", 3)
    run("chat", *where, *cache, *brief, input="Hi\n")
    assert last_line(run("sessions", "--json"))["sessions"][0]["keeps"] == MIXED
    run("chat", *brief, *cache, input="Who?\n")
    refused = run("chat", *brief, "--cache", FULL, code=2)
    assert "leave out --cache" in refused.stderr


def test_layer_types_that_the_model_has_not(mixed):
    for cache, says in (
        (FULL, "the model has ['full_attention', 'sliding_attention']"),
        (MIXED + ";" + FULL, "each type once"),
    ):
        assert says in run("generate", "Hi", "--model", mixed, "--cache", cache, code=2).stderr


def test_finetune_with_a_spec_for_each_type_of_layer(mixed, tmp_path):
    data = finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())
    options = ("--model", mixed, "--length", 32, "--steps", 1, "--json")
    result = run("finetune", data, "--out", tmp_path / "out", "--cache", MIXED, *options)
    assert last_line(result)["cache"] == MIXED
