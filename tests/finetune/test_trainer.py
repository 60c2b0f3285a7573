"""transformers' and TRL's trainers, with and without gradients through a cache, train alike."""

from __future__ import annotations

import pytest
import torch
from support.autograd_gradients import texts
from support.tiny_models import tiny
from transformers import Trainer, TrainingArguments

import kvkeep
from kvkeep.finetune import LongContext
from kvkeep.train import backward


class LongTrainer(LongContext, Trainer):
    pass


def examples(count=8):
    ids, labels, _ = texts(count, 24)
    return [{"input_ids": i, "labels": x.clone()} for i, x in zip(ids, labels, strict=True)]


def padded(rows):
    """A collator: rows of different lengths, padded on the right."""
    for index, row in enumerate(rows):
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        if index:
            row["attention_mask"][-index:] = 0
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trained(trainer, tmp_path, model=None, **options):
    """The weights after three steps, and the losses before and after."""
    model = tiny("llama") if model is None else model
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = examples()
    made = trainer(
        model=model,
        args=arguments,
        train_dataset=[dict(row) for row in data],
        eval_dataset=[dict(row) for row in data[:4]],
        data_collator=padded,
        **options,
    )
    before = made.evaluate()["eval_loss"]
    made.train()
    logged = [row["loss"] for row in made.state.log_history if "loss" in row]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, [before, *logged, made.evaluate()["eval_loss"]]


def test_trains_as_the_trainer_does(tmp_path):
    weights, losses = trained(LongTrainer, tmp_path, cache="keep_all", chunk=7)
    expected, known = trained(Trainer, tmp_path)
    start = torch.cat([p.detach().flatten() for p in tiny("llama").parameters()])
    assert (expected - start).norm() > 1e-2
    assert (weights - expected).norm() < 1e-5 * (expected - start).norm() + 1e-6
    assert losses == pytest.approx(known, rel=1e-4)
    assert losses[-1] < losses[0]


def test_trains_with_the_budget_it_is_given(tmp_path):
    weights, losses = trained(LongTrainer, tmp_path, cache="h2o:8", chunk=8)
    exact, _ = trained(LongTrainer, tmp_path, cache="keep_all", chunk=8)
    assert losses[-1] < losses[0]
    assert not torch.allclose(weights, exact)


def test_refuses_what_it_cannot_train_on(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = LongTrainer(model=tiny("llama"), args=arguments, chunk=8)
    text = padded(examples(2))
    with pytest.raises(kvkeep.UnsupportedError, match="position_ids"):
        trainer.training_step(trainer.model, text | {"position_ids": text["input_ids"]})
    text.pop("labels")
    with pytest.raises(kvkeep.UnsupportedError, match="use a trainer of cross entropy"):
        trainer.training_step(trainer.model, text)
    with pytest.raises(kvkeep.UnsupportedError, match="metrics cannot"):
        trainer.prediction_step(trainer.model, text, prediction_loss_only=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_smoothing_factor", {"arguments": {"label_smoothing_factor": 0.1}}),
        ("compute_loss_func", {"compute_loss_func": lambda *args, **options: None}),
    ],
)
def test_refuses_other_losses(name, options, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, **options.pop("arguments", {})
    )
    with pytest.raises(
        kvkeep.UnsupportedError, match=f"{name}: LongContext computes the gradients of"
    ):
        LongTrainer(model=tiny("llama"), args=arguments, **options)


def test_accelerate():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, labels, _ = texts(2, 24)
    losses = []
    for _ in range(3):
        with accelerator.autocast():
            losses.append(float(backward(model, ids, labels, cache="h2o:8", chunk=8)))
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[2] < losses[0]


def test_trl(tmp_path):
    """TRL's trainer, with everything that it does beside."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    class LongSFT(LongContext, trl.SFTTrainer):
        pass

    def run(trainer, **options):
        model = tiny("llama")
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            optim="sgd",
            learning_rate=0.05,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            packing=False,
            max_length=None,
            eos_token=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        rows = [{"input_ids": row["input_ids"].tolist()} for row in examples()]
        made = trainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            **options,
        )
        made.train()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    expected = run(trl.SFTTrainer)
    start = torch.cat([p.detach().flatten() for p in tiny("llama").parameters()])
    moved = (expected - start).norm()
    assert moved > 1e-3
    assert (run(LongSFT, chunk=7) - expected).norm() < 1e-4 * moved


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(96)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
    )
