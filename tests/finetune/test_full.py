"""All weights are trained as by a plain loop, and the result is a model that transformers loads."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import finetune_inputs
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.finetune.checkpoint import CheckpointError
from kvkeep.finetune.data import order, pieces, read
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.run import finetune

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 32
OPTIONS = {"cache": "keep_all", "length": LENGTH, "lr": 1e-2, "full": True, "chunk": 16}


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())


def tuned(data, out, model, resume=False, stop=None, **options):
    def progress(doing, share):
        if stop is not None and doing.startswith(stop):
            raise KeyboardInterrupt

    tokenizer = finetune_inputs.tokenizer()
    given = Options(**OPTIONS | options)
    return finetune(model, tokenizer, data, out, given, resume=resume, progress=progress)


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), pytest.param("qwen3-moe", False, marks=pytest.mark.slow)],
)
def test_the_weights_are_those_of_a_plain_loop(data, tmp_path, family, tied):
    model = finetune_inputs.model(family, tie_word_embeddings=tied).requires_grad_(False)
    out, steps = tmp_path / "out", 3
    tuned(data, out, model, steps=steps, clip=0.5)
    found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert type(found) is type(model)
    assert found.dtype == torch.float32

    tokenizer = finetune_inputs.tokenizer()
    texts = pieces(read(data, tokenizer)[:-1], LENGTH)
    model = finetune_inputs.model(family, tie_word_embeddings=tied)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step, index in enumerate(order(len(texts), 0, 0)[:steps]):
        ids, labels = texts[index]
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        optimizer.zero_grad()
        cross_entropy(logits, labels[1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimizer.step()
    loaded = dict(found.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(loaded[name], p, atol=1e-3, rtol=1e-3)
    assert max((p - start[name]).abs().max() for name, p in model.named_parameters()) > 1e-2
    text = "3 and 4 make 7."
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == tokenizer(text).input_ids


def test_only_kvkeep_moves_the_model(data, tmp_path, monkeypatch):
    moved, model = [], finetune_inputs.model()

    def recording(self, *args, **options):
        moved.append((args, options))
        return self

    monkeypatch.setattr(torch.nn.Module, "to", recording)
    monkeypatch.setattr(type(model), "to", recording)
    tuned(data, tmp_path / "out", model, steps=1)
    assert moved == [((torch.device("cpu"),), {})]


def test_an_interrupted_run_gives_the_same_model(data, tmp_path):
    options = {"steps": 4, "save_every": 2, "cache": "h2o:16"}
    first = tuned(data, tmp_path / "whole", finetune_inputs.model(), **options)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tuned(data, out, finetune_inputs.model(), stop="step 3/", **options)
    early = AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")
    assert not early.lm_head.weight.equal(finetune_inputs.model().lm_head.weight)
    config = out / "checkpoint-2/config.json"
    whole = config.read_text()
    config.write_text(whole.replace("1e-06", "1e-05"))
    assert config.read_text() != whole
    with pytest.raises(CheckpointError, match=r"config\.json is damaged: it has another checksum"):
        tuned(data, out, finetune_inputs.model(), resume=True, **options)
    config.write_text(whole)
    second = tuned(data, out, finetune_inputs.model(), resume=True, **options)
    assert second["train_loss"] == first["train_loss"]
    for name in ("model.safetensors", "config.json", "checkpoint-4/optimizer.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads(config.read_text())["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(CheckpointError, match="full is False, was True"):
        tuned(data, out, finetune_inputs.model(), resume=True, **options, full=False)


def test_models_that_cannot_be_trained_whole(data, tmp_path):
    adapted = get_peft_model(finetune_inputs.model(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(OptionError, match="has an adapter; give its base model"):
        tuned(data, tmp_path / "out", adapted)
    quantized = finetune_inputs.model()
    quantized.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(OptionError, match="quantized weights, which have no gradients"):
        tuned(data, tmp_path / "out", quantized)
