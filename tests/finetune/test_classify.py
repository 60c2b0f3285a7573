"""Classes are learned as transformers computes them, and the result works there."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from support import finetune_inputs
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from kvkeep.finetune.classify import labels_of
from kvkeep.finetune.data import DataError
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.run import finetune

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"task": "classify", "cache": "keep_all", "chunk": 7, "length": 64, "batch": 3}


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.labelled())


def tuned(data, out, model=None, resume=False, holdout=3, **options):
    model = finetune_inputs.classifier() if model is None else model
    given = Options(**OPTIONS | options, holdout=holdout)
    tokenizer = finetune_inputs.tokenizer()
    return finetune(model, tokenizer, data, out, given, resume=resume)


def measured(model, lines, labels=("down", "up")):
    """The mean loss and the accuracy that transformers finds for a batch of texts."""
    given = [json.loads(line) for line in lines]
    tokenizer = finetune_inputs.tokenizer()
    ids = [torch.tensor(tokenizer(one["text"]).input_ids) for one in given]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=2)
    logits = model(padded, attention_mask=(padded != 2).long()).logits
    classes = torch.tensor([labels.index(one["label"]) for one in given])
    right = (logits.argmax(-1) == classes).float().mean()
    return cross_entropy(logits, classes), right.item()


@pytest.mark.parametrize("full", [False, True])
def test_the_result_works_in_transformers(data, tmp_path, full):
    out, held = tmp_path / "out", finetune_inputs.labelled()[-3:]
    result = tuned(data, out, steps=12, lr=3e-3, full=full, eval_every=6)
    loss, accuracy = measured(finetune_inputs.classifier(), held)
    assert result["untuned_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert result["untuned_accuracy"] == pytest.approx(accuracy)
    if full:
        model = AutoModelForSequenceClassification.from_pretrained(out)
        names = model.config.id2label
    else:
        model = PeftModel.from_pretrained(finetune_inputs.classifier(), out).eval()
        names = {int(n): name for n, name in json.loads((out / "labels.json").read_text()).items()}
    assert names == {0: "down", 1: "up"}
    loss, accuracy = measured(model, held)
    assert result["tuned_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert result["tuned_accuracy"] == pytest.approx(accuracy) == 1
    assert result["tuned_loss"] < result["untuned_loss"] / 2
    assert [set(one) for one in result["eval_loss"]] == [{"step", "loss", "accuracy"}] * 2
    assert tuned(data, out, steps=12, lr=3e-3, full=full, eval_every=6, resume=True) == result


def test_the_first_step_is_that_of_plain_autograd(data, tmp_path):
    model = finetune_inputs.classifier().double()
    options = {"steps": 1, "full": True, "batch": 12, "lr": 1e-3, "clip": 0}
    result = tuned(data, tmp_path / "out", model, holdout=0, **options)
    plain = finetune_inputs.classifier().double()
    loss, _ = measured(plain, finetune_inputs.labelled())
    assert result["train_loss"][0]["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert result["tuned_accuracy"] is None
    loss.backward()
    torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0).step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": "no label"}, r"an object of \['text'\]; give one with \"text\" and \"label\""),
        ({"text": "x y", "label": 1.5}, '"label" is 1.5; give text'),
        ({"text": "x y", "label": True}, '"label" is True; give text'),
        ({"text": " ", "label": "up"}, "\"text\" is ' '; give text"),
        ({"text": "x y", "label": "side"}, "label 'side' is not one of the model's: 'down', 'up'"),
        (
            {"text": "x" * 65, "label": "up"},
            "65 tokens; texts with labels are not cut, so give 2 to 64",
        ),
        ({"text": "x", "label": "up"}, "1 tokens; "),
        ({"text": "x y\n", "label": "up"}, "the text ends with the padding token 2"),
    ],
)
def test_lines_that_are_refused(tmp_path, line, says):
    lines = [*finetune_inputs.labelled(), json.dumps(line).encode()]
    data = finetune_inputs.write(tmp_path / "texts.jsonl", *lines)
    with pytest.raises(DataError, match=f"texts.jsonl, line 13: {says}"):
        tuned(data, tmp_path / "out")


def test_names_of_classes(tmp_path):
    def written(*labels):
        lines = [json.dumps({"text": "x", "label": label}).encode() for label in labels]
        return finetune_inputs.write(tmp_path / "texts.jsonl", *lines)

    assert labels_of(written("b", "a", "b")) == ["a", "b"]
    assert labels_of(written(10, 9, "2")) == ["2", "9", "10"]
    with pytest.raises(DataError, match=r"all 2 texts have the label 'a'; give .* two labels"):
        labels_of(written("a", "a"))


def test_models_that_cannot_classify(data, tmp_path):
    with pytest.raises(OptionError, match=r"LlamaForCausalLM has no classification head \(score\)"):
        tuned(data, tmp_path / "out", finetune_inputs.model())
    model = finetune_inputs.classifier()
    model.config.pad_token_id = None
    with pytest.raises(OptionError, match="no pad_token_id"):
        tuned(data, tmp_path / "out", model)
