"""Rollouts for TRL's GRPO: what a trainer is given, and that it learns from it."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.finetune import Rollouts
from kvkeep.generate.sampling import repetition

trl = pytest.importorskip("trl")

ANSWERS, LONGEST, TEMPERATURE = 4, 6, 0.7
LIKED = "w7"


def trainer_of(model, tokenizer, tmp_path, rollouts, **options):
    from datasets import Dataset

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2 * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=LONGEST,
        learning_rate=0.3,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        **{"temperature": TEMPERATURE} | options,
    )
    prompts = ["w3 w4 w5", "w9", "w8 w7 w6 w5", "w11 w12"]

    def likes(completions, **_):
        return [float(text.split().count(LIKED)) for text in completions]

    return trl.GRPOTrainer(
        model=model,
        reward_funcs=likes,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )


class Noted(Rollouts):
    """Keeps what it returned, with the weights at the time."""

    def __call__(self, prompts, trainer):
        found = super().__call__(prompts, trainer)
        weights = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        self.seen.append((list(prompts), found, weights))
        return found

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []


def test_grpo_learns_from_rollouts(tokenizer, tmp_path):
    torch.manual_seed(3)
    model, rollouts = tiny("llama"), Noted(step_tokens=32)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    trainer_of(model, tokenizer, tmp_path, rollouts).train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).norm() > 1e-4
    assert model.training  # as before, and with its own attention
    assert "kvkeep" not in str(model.config._attn_implementation)
    plain = tiny("llama").eval()
    for prompts, found, weights in rollouts.seen:
        assert len(prompts) == len(found["completion_ids"]) == 2 * ANSWERS
        plain.load_state_dict(weights)
        for text, prompt, answer, logprobs in zip(prompts, *found.values(), strict=True):
            assert prompt == tokenizer(text)["input_ids"]
            assert 0 < len(answer) == len(logprobs) <= LONGEST
            assert tokenizer.eos_token_id not in answer[:-1]
            with torch.no_grad():
                logits = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / TEMPERATURE).log_softmax(-1)[range(len(answer)), answer]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)
    assert len({tuple(answer) for answer in rollouts.seen[0][1]["completion_ids"]}) > 2


def test_an_attached_model_stays_attached_and_what_a_batch_cannot_do_is_refused(
    tokenizer, tmp_path
):
    model = tiny("llama")
    kvkeep.attach(model)
    trainer = trainer_of(model, tokenizer, tmp_path, Rollouts(), repetition_penalty=1.5)
    found = Rollouts("window:4")(["w3 w4"] * 2 + ["w5"], trainer)
    assert [len(ids) for ids in found["prompt_ids"]] == [2, 2, 1]
    assert "kvkeep" in model.config._attn_implementation
    trainer.args.generation_kwargs = {"num_beams": 2}
    with pytest.raises(kvkeep.UnsupportedError, match="generation_kwargs"):
        Rollouts()(["w3"], trainer)


def test_repetition_is_penalised_as_in_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, logits = torch.tensor([[3, 5, 3, 9]]), torch.randn(1, 12)
    torch.testing.assert_close(
        repetition(1.4)(ids, logits), RepetitionPenaltyLogitsProcessor(1.4)(ids, logits)
    )
