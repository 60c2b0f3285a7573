"""Rollouts: batched answers for reinforcement learning with TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from kvkeep.errors import UnsupportedError
from kvkeep.generate import Answer, Batch, SamplingParams
from kvkeep.generate.sampling import Processor, repetition
from kvkeep.host import DEFAULT_SPEC, Specs, host_of

_UNKNOWN = ("generation_kwargs", "cache_implementation")


class Rollouts:
    """A `rollout_func` for TRL's `GRPOTrainer`: one `Batch` computes the answers to all prompts of
    a step. Equal prompts are read once, and their answers share its slots.

    The trainer's sampling arguments apply: temperature, top_p, top_k, min_p, repetition_penalty and
    max_completion_length. Log probabilities are computed at the trainer's temperature, as its loss
    expects. Random numbers come from torch's generator.

    Args:
        spec: the spec of the caches. With a policy that evicts, the trained model, which sees whole
            texts, would give the answers other probabilities.
        options: options of `Batch`.
    """

    def __init__(self, spec: Specs = DEFAULT_SPEC, **options: Any) -> None:
        self._spec, self._options = spec, options

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Answer each of the prompts, texts or conversations, once.

        Returns:
            For each prompt its token ids, `prompt_ids`; its answer's ids, `completion_ids`; and
            their `logprobs`.

        Raises:
            UnsupportedError: a batch does not support the trainer's arguments.
            CapacityError, ShapeError: a prompt and its answer are too long.
        """
        args = trainer.args
        given = [name for name in _UNKNOWN if getattr(args, name, None)]
        if given:
            what = f"{', '.join(given)} of the trainer's arguments"
            raise UnsupportedError(f"{what} cannot be applied to a Batch; leave them out")
        model = trainer.accelerator.unwrap_model(trainer.model)
        host, training = host_of(model), model.training
        attached_here = not host.attached
        if attached_here:
            host.attach(self._spec)
        model.eval()
        try:
            answers = self._answers(model, prompts, trainer)
        finally:
            model.train(training)
            if attached_here:
                host.detach()
        return {
            "prompt_ids": [answer.prompt.tolist() for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
        }

    def _answers(self, model: Any, prompts: Sequence[Any], trainer: Any) -> list[Answer]:
        args = trainer.args
        batch = Batch(model, spec=self._spec, **self._options)
        answers: list[Answer] = []
        for prompt, same in groupby(prompts):
            processors: list[Processor] = []
            if args.repetition_penalty != 1:
                processors.append(repetition(args.repetition_penalty))
            params = SamplingParams(
                max_new_tokens=args.max_completion_length,
                temperature=args.temperature,
                top_k=args.top_k or 0,
                top_p=args.top_p,
                min_p=args.min_p or 0.0,
                seed=int(torch.randint(2**62, ())),
                processors=processors,
                end_tokens=frozenset(getattr(trainer, "eos_token_ids", ())) or None,
                logprobs=True,
                logprob_temperature=args.temperature,
            )
            answers += batch.add(_ids(prompt, trainer), params, n=len(list(same)))
        for answer in tqdm(batch, "Rollouts", len(answers), disable=None, leave=False):
            if answer.error is not None:
                raise answer.error
        return answers


def _ids(prompt: Any, trainer: Any) -> list[int]:
    """The token ids of a text or a conversation, computed like the trainer's."""
    processing = trainer.processing_class
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts = [part for one in contents if isinstance(one, list | tuple) for part in one]
    if strange := {part.get("type") for part in parts} - {"text"}:
        what = f"a prompt with parts of type {', '.join(map(str, strange))}, but rollouts read text"
        raise UnsupportedError(f"{what}; leave images and sound to the trainer's own generation")
    tokenizer = getattr(processing, "tokenizer", processing)
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    options: Mapping[str, Any] = getattr(trainer, "chat_template_kwargs", None) or {}
    render: Callable[..., list[int]] = tokenizer.apply_chat_template
    return render(
        prompt,
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
