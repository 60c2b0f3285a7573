"""`kvkeep finetune --host litgpt`: a checkpoint directory, LitGPT's LoRA, and its files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from litgpt import Config
from litgpt.scripts.merge_lora import merge_lora
from litgpt.utils import save_config
from safetensors.torch import load_file, save_file
from support import finetune_inputs
from support.tiny_litgpt import tiny_gpt
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app
from kvkeep.errors import KVKeepError, UnsupportedError
from kvkeep.finetune.litgpt_lora import LitGPTLora
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.run import finetune
from kvkeep.litgpt import lora
from kvkeep.litgpt.checkpoint import load
from kvkeep.litgpt.lora import ADAPTER, SETTINGS, adapted, adapter_weights, with_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint directory of LitGPT."""
    path = tmp_path_factory.mktemp("checkpoint")
    gpt = tiny_gpt(padded_vocab_size=98, bias=False)
    torch.save(gpt.state_dict(), path / "lit_model.pth")
    save_config(gpt.config, path)
    finetune_inputs.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())


def run(folder, data, out, *more):
    options = ("--cache", "h2o:16", "--length", str(LENGTH), "--lr", "1e-2", "--rank", "4")
    given = (str(data), "--out", str(out), "--model", str(folder), "--host", "litgpt")
    return CliRunner().invoke(app, ["finetune", *given, *options, *more])


def ids(n=40):
    return torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(3))


def test_a_checkpoint_directory(folder):
    gpt, tokenizer = load(str(folder), device="cpu")
    own = tiny_gpt(padded_vocab_size=98, bias=False)
    with torch.no_grad():
        assert gpt(ids()).equal(own(ids()))
        assert tokenizer.decode(tokenizer("How?").input_ids) == "How?"
        half, _ = load(str(folder), "bf16", "cpu")
        assert half.lm_head.weight.dtype == torch.bfloat16
        assert half.cos.equal(gpt.cos)  # in float32
        torch.testing.assert_close(half(ids()).float(), own(ids()), rtol=0.2, atol=0.2)


def sets(name, value):
    """Change one field of a checkpoint's config."""

    def changed(directory):
        config = Config.from_file(directory / "model_config.yaml")
        setattr(config, name, value)
        save_config(config, directory)

    return changed


def test_what_is_no_checkpoint_is_refused(folder, tmp_path):
    with pytest.raises(UnsupportedError, match=r"no model_config\.yaml and no lit_model\.pth"):
        load(str(tmp_path))
    shutil.copytree(folder, unread := tmp_path / "unread")
    (unread / "lit_model.pth").write_bytes(b"PK")  # all of these are found before it is read
    for options, reason in (
        ({"dtype": "float8_e4m3fn"}, "no dtype 'float8_e4m3fn'"),
        ({"device": "tpu7"}, "no device 'tpu7'"),
        ({"adapter": str(tmp_path)}, "cannot read the adapter"),
    ):
        with pytest.raises(KVKeepError, match=reason):
            load(str(unread), **options)
    for changed, reason in (
        (lambda x: torch.save({"a": object}, x / "lit_model.pth"), "cannot read"),
        (lambda x: (x / "lit_model.pth").write_bytes(b"PK" * 99), "cannot read"),
        (lambda x: torch.save({"a": 1}, x / "lit_model.pth"), "not a state dict of tensors"),
        (lambda x: torch.save({"a": torch.ones(1)}, x / "lit_model.pth"), "there are 0 layers"),
        (lambda x: (x / "model_config.yaml").write_text("odd: 1"), "does not describe"),
        (sets("block_size", 1 << 40), "block_size is"),
        (sets("rotary_percentage", 1e9), "rotated dimensions of 8"),
        (lambda x: (x / "model_config.yaml").write_text("- !!python/object:os.x"), "not describe"),
    ):
        shutil.copytree(folder, broken := tmp_path / "broken")
        changed(broken)
        with pytest.raises(UnsupportedError, match=reason):
            load(str(broken))
        shutil.rmtree(broken)


def test_an_adapter_shares_the_weights_and_changes_nothing_yet():
    gpt = tiny_gpt()
    found = adapted(gpt, rank=4, alpha=8)
    with torch.no_grad():
        assert found(ids()).equal(gpt(ids()))
    weight = found.transformer.h[0].attn.qkv.linear.weight
    assert weight.data_ptr() == gpt.transformer.h[0].attn.qkv.weight.data_ptr()
    assert all(("lora" in name) == p.requires_grad for name, p in found.named_parameters())
    some = adapter_weights(adapted(gpt, rank=4, alpha=8, targets=["mlp"]))
    assert some
    assert all(".mlp." in name for name in some)
    with pytest.raises(UnsupportedError, match="no LoRA for q_proj; use query, key"):
        adapted(gpt, rank=4, alpha=8, targets=["q_proj"])
    with pytest.raises(UnsupportedError, match=r"litgpt\.lora\.GPT"):
        adapted(found, rank=4, alpha=8)


def test_the_loss_falls_and_the_adapter_is_loaded_again(folder, data, tmp_path):
    out = tmp_path / "out"
    done = run(folder, data, out, "--steps", "12", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    losses = [step["loss"] for step in result["train_loss"]]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert result["tuned_loss"] < result["untuned_loss"]

    gpt, _ = load(str(folder), device="cpu", adapter=str(out))
    base, _ = load(str(folder), device="cpu")
    with torch.no_grad():
        expected = gpt(ids())
        assert (expected - base(ids())).abs().max() > 0.01
        with kvkeep.attach(gpt):  # and is served
            served = gpt(ids(), torch.arange(40))
        torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)

        merge_lora(out)  # LitGPT's own command reads the directory
        merged, _ = load(str(out), device="cpu")
        torch.testing.assert_close(merged(ids()), expected, rtol=1e-4, atol=1e-4)


def test_the_weights_are_those_of_a_plain_loop(folder, data, tmp_path):
    """Of LitGPT's LoRA and torch's AdamW, without a cache."""
    from kvkeep.finetune.data import batched, order, pieces, read

    gpt, tokenizer = load(str(folder), device="cpu")
    options = Options(cache="keep_all", length=LENGTH, lr=1e-2, rank=4, steps=3, batch=2, clip=0.0)
    options = replace(options, holdout=0)
    result = finetune(gpt, tokenizer, data, tmp_path / "out", options)
    torch.manual_seed(0)
    model = adapted(gpt, rank=4, alpha=32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    texts = pieces(read(data, tokenizer), LENGTH)
    places = order(len(texts), 0, 0)
    for step, share in enumerate([1, 2 / 3, 1 / 3]):
        chosen = [texts[index] for index in places[2 * step : 2 * step + 2]]
        summed = 0.0
        for text, labels, _ in batched(chosen, 1):
            each = model(text)[0, :-1]
            summed = summed + torch.nn.functional.cross_entropy(
                each, labels[0, 1:], reduction="sum"
            )
        mean = summed / sum(text.learned for text in chosen)
        assert result["train_loss"][step]["loss"] == pytest.approx(mean.item(), rel=1e-4)
        optimizer.zero_grad()
        mean.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * share
        optimizer.step()
    found, expected = load_file(tmp_path / "out" / ADAPTER), adapter_weights(model)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name].detach(), atol=1e-3, rtol=1e-3)


def test_a_resumed_run_gives_the_same_weights(folder, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("--steps", "6", "--dropout", "0.1")
    assert run(folder, data, whole, *options, "--save-every", "3", "--keep", "9").exit_code == 0
    parts.mkdir()
    shutil.copytree(whole / "checkpoint-3", parts / "checkpoint-3")
    assert run(folder, data, parts, *options).exit_code == 2  # it holds a run
    resumed = run(folder, data, parts, *options, "--resume")
    assert resumed.exit_code == 0, resumed.output
    found, expected = (load_file(one / ADAPTER) for one in (parts, whole))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)


def test_odd_adapters_are_refused(folder, tmp_path, monkeypatch):
    gpt, _ = load(str(folder), device="cpu")
    out, found = tmp_path / "out", adapted(gpt, rank=4, alpha=8, dropout=0.5)
    out.mkdir()
    with pytest.raises(UnsupportedError, match="cannot read the adapter"):
        with_adapter(gpt, out)
    settings = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.5, "lora_head": False}
    settings |= {f"lora_{x}": True for x in ("query", "key", "value", "projection", "mlp")}
    save_file({name: x.detach() for name, x in adapter_weights(found).items()}, out / ADAPTER)
    (out / SETTINGS).write_text(json.dumps(settings))
    assert not with_adapter(gpt, out).training
    for wrong, reason in (
        ({"lora_r": 10**9}, "lora_r is 1000000000"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_mlp": False}, "for another model"),
        ({"lora_r": 8}, "for another model"),
    ):
        (out / SETTINGS).write_text(json.dumps(settings | wrong))
        with pytest.raises(UnsupportedError, match=reason):
            with_adapter(gpt, out)
    (out / SETTINGS).write_text(json.dumps(settings | {"lora_r": 1 << 16}))
    monkeypatch.setattr(lora, "_with_adapter", None)  # allocates
    with pytest.raises(UnsupportedError, match="for another model"):
        with_adapter(gpt, out)


def test_bad_options(folder, data, tmp_path):
    out = tmp_path / "out"
    for more, reason in (
        (("--targets", "q_proj"), "no LoRA for q_proj"),
        (("--host", "jax"), "no host 'jax'"),
        (("--model", str(tmp_path)), "no LitGPT checkpoint"),
    ):
        found = run(folder, data, out, *more)
        assert found.exit_code == 2
        assert reason in " ".join(found.output.split())
    gpt, tokenizer = load(str(folder), device="cpu")
    with pytest.raises(OptionError, match="cannot be written from shards"):
        LitGPTLora().prepare(gpt, replace(Options().checked(), offload=True))
    gpt = adapted(gpt, rank=2, alpha=2)
    with pytest.raises(OptionError, match=r"litgpt\.lora\.GPT"):
        finetune(gpt, tokenizer, data, out, Options(cache="keep_all", length=LENGTH))
