"""TRL's trainers train an attached model as they train it without kvkeep."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.finetune import LongContext, Rollouts

trl = pytest.importorskip("trl")

pytestmark = pytest.mark.slow  # imports TRL's trainers, and trains

TEXTS = ["w3 w4 w5 w6 w7 w8 w9 w10", "w9 w8 w11", "w8 w7 w6 w5 w20 w21", "w11 w12 w13 w14"]
DATA = {
    "SFT": {"text": TEXTS},
    "DPO": {"prompt": TEXTS, "chosen": [" w30 w31"] * 4, "rejected": [" w40 w41 w42"] * 4},
    "KTO": {"prompt": TEXTS, "completion": [" w30 w31"] * 4, "label": [True, False] * 2},
    "GRPO": {"prompt": TEXTS},
    "RLOO": {"prompt": TEXTS},
}
SAMPLING = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
OPTIONS = {
    "SFT": {"per_device_train_batch_size": 2, "eos_token": None, "max_length": None},
    "DPO": {"per_device_train_batch_size": 2},
    "KTO": {"per_device_train_batch_size": 4},
    "GRPO": SAMPLING,
    "RLOO": SAMPLING,
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tokenizer, tmp_path_factory):
    """A model's: trainers load a reference model from there."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def varied(completions, **_):
    return [float(len(set(text.split())) + text.count("w7")) for text in completions]


def trainer_of(name, model, tokenizer, place, base=None, parts=None, **options):
    from datasets import Dataset

    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(place),
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        **OPTIONS[name] | options,
    )
    parts = dict(parts or {})
    if "num_generations" in OPTIONS[name]:
        parts["reward_funcs"] = varied
    return (base or getattr(trl, f"{name}Trainer"))(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(DATA[name]),
        processing_class=tokenizer,
        **parts,
    )


def trained(trainer):
    """How far each weight moved, and the losses."""
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten().clone() for p in weights])
    torch.manual_seed(5)
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in weights])
    return after - before, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", list(DATA))
def test_an_attached_model_is_trained_alike(name, checkpointing, folder, tokenizer, tmp_path):
    """With every budget, but where answers are generated: there with one that keeps all."""
    options = {"gradient_checkpointing": checkpointing}
    plain = AutoModelForCausalLM.from_pretrained(folder)
    expected, losses = trained(trainer_of(name, plain, tokenizer, tmp_path, **options))
    assert expected.norm() > 1e-2
    for spec in ["keep_all"] if OPTIONS[name] is SAMPLING else ["keep_all", "h2o:4+int8"]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        kvkeep.attach(model, spec)
        moved, found = trained(trainer_of(name, model, tokenizer, tmp_path, **options))
        assert (moved - expected).norm() < 1e-4 * expected.norm()
        assert found == pytest.approx(losses, abs=1e-5)


def test_answers_come_through_the_budget(tokenizer, folder, tmp_path):
    """Sampled with the same random numbers, they differ from those of the whole prompt."""
    moved = {}
    for spec in ("keep_all", "window:2"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        kvkeep.attach(model, spec)
        moved[spec], _ = trained(trainer_of("GRPO", model, tokenizer, tmp_path))
    assert (moved["window:2"] - moved["keep_all"]).norm() > 0.1 * moved["keep_all"].norm()


def test_rollouts_beside_gradient_checkpointing(tokenizer, folder, tmp_path):
    """It changes nothing but memory, and is on again after the rollouts."""
    moved = []
    for checkpointing in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        parts = {"rollout_func": Rollouts()}
        options = {"gradient_checkpointing": checkpointing, "parts": parts}
        moved.append(trained(trainer_of("GRPO", model, tokenizer, tmp_path, **options))[0])
        assert model.is_gradient_checkpointing == checkpointing
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_long_context_refuses_other_losses(name, tokenizer, folder, tmp_path):
    base = type(f"Long{name}", (LongContext, getattr(trl, f"{name}Trainer")), {})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(kvkeep.UnsupportedError, match=f"or leave LongContext out of Long{name}"):
        trainer_of(name, model, tokenizer, tmp_path, base, gradient_checkpointing=False)


def test_long_context_refuses_gradient_checkpointing_and_packed_texts(tokenizer, folder, tmp_path):
    class LongSFT(LongContext, trl.SFTTrainer):
        pass

    for options, error, reason in [
        ({}, kvkeep.StateError, "arguments gradient_checkpointing=False"),
        (
            {"gradient_checkpointing": False, "padding_free": True},
            kvkeep.UnsupportedError,
            "pads texts and packs none",
        ),
    ]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = trainer_of(
            "SFT", model, tokenizer, tmp_path, LongSFT, {"cache": "h2o:8", "chunk": 4}, **options
        )
        with pytest.raises(error, match=reason):
            trainer.train()
