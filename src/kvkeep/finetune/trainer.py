"""transformers' Trainer for a run: the Trainer's loop, schedule, state and callbacks with kvkeep's
losses.

One batch of the Trainer is all data of a step; `Processes` divides it among the processes.
accelerate sees a single process, so it neither wraps nor moves the model.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import LossError
from kvkeep.extras import needed_by
from kvkeep.files.offload import Offload
from kvkeep.finetune.checkpoint import Checkpoints
from kvkeep.finetune.data import Tokens, batched, order
from kvkeep.finetune.options import Options, seed_of
from kvkeep.finetune.processes import full_tensor
from kvkeep.finetune.task import Task
from kvkeep.host.progress import Progress
from kvkeep.train import backward, loss

with needed_by("kvkeep.finetune", "finetune"):
    from transformers import PrinterCallback, Trainer, TrainingArguments

_OF_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE")


class FineTuner(Trainer):
    """A run in progress.

    Args:
        model: the model; the parameters that require gradients are trained.
        checkpoints: the run's checkpoints.
        texts: the pieces for training, and the pieces for evaluation.
        resumed: whether `train` will resume from a checkpoint.
        progress: called during and after each step, in the leading process.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        options: Options,
        checkpoints: Checkpoints,
        texts: tuple[list[Tokens], list[Tokens]],
        *,
        resumed: bool,
        progress: Progress,
    ) -> None:
        self._texts, self._held = texts
        self._task, self._options, self._checkpoints = task, options, checkpoints
        self._processes, self._progress = checkpoints.processes, progress
        self._offload = Offload(options.host_bytes, options.spill)
        self._said, self._clock = "training", time.monotonic()
        assert options.steps is not None
        pieces = options.steps * options.batch * options.accumulate
        if options.epochs is not None:
            pieces = options.epochs * len(self._texts)
        with _alone():
            arguments = TrainingArguments(
                output_dir=str(checkpoints.out),
                per_device_train_batch_size=options.batch * options.accumulate,
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                optim="adamw_torch",
                eval_strategy="steps" if self._held else "no",
                eval_on_start=bool(self._held) and not resumed,
                save_strategy="steps",
                logging_steps=1,
                disable_tqdm=True,
                use_cpu=True,  # for the Trainer's own tensors
                use_cache=getattr(getattr(model, "config", None), "use_cache", True),
                **options.arguments(),
            )
            if not self._processes.leads:
                arguments.report_to = []
            super().__init__(
                model=model,
                args=arguments,
                data_collator=self._learned_at,
                train_dataset=range(pieces),
                eval_dataset=self._held,
            )
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False

    def _learned_at(self, places: list[int]) -> dict[str, Any]:
        """The `texts` of a step: the pieces at some places of the run. Each epoch has its own
        order, and a step may contain the last pieces of one epoch and the first of the next."""
        found, count = [], len(self._texts)
        for place in places:
            epoch, index = divmod(place, count)
            found.append(self._texts[order(count, self._options.seed, epoch)[index]])
        return {"texts": found}

    # -- losses -----------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute the gradients of a step; return its loss. Both are sums over all processes."""
        begun, step, texts = time.monotonic(), self.state.global_step, inputs["texts"]
        model.train()
        way = {"chunk": self._options.chunk_of(step), "scale": self._processes.scale}
        self._loss = self._summed(backward, texts, f"step {step + 1}", **way)
        self._processes.sum_gradients(p for p in model.parameters() if p.requires_grad)
        tokens = sum(len(text.ids) for text in texts)
        self.state.num_input_tokens_seen += tokens
        self._rate = tokens / (time.monotonic() - begun)
        return torch.tensor(self._loss)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        norm = full_tensor(torch.as_tensor(found))
        if not bool(torch.isfinite(norm)):
            step = f"step {self.state.global_step + 1}: the norm of the gradients is {float(norm)}"
            remedy = "nothing was changed; lower the learning rate, or compute in float32"
            raise LossError(f"{step}, the loss {self._loss}: {remedy}")
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """transformers' schedule from the resumed step, one step late because its first rate is
        0."""
        scheduler: Any = super().create_scheduler(num_training_steps + 1, optimizer)
        scheduler.last_epoch = done = self.state.global_step + 1
        groups = scheduler.optimizer.param_groups
        for group, share in zip(groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * share(done)
        scheduler._last_lr = [group["lr"] for group in groups]
        return scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted."""
        return 0

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model on its device."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The mean loss of the evaluation texts, and the share of correctly classified texts."""
        model: Any = self.model
        step, task = self.state.global_step, self._task
        self._say("evaluating")
        model.eval()
        if task.right is not None:
            task.right = 0
        when = f"evaluation after step {step}"
        metrics = {"eval_loss": self._summed(loss, self._held, when, chunk=self._options.chunk)}
        said = f"evaluated after step {step}, loss {metrics['eval_loss']:.4f}"
        if task.right is not None:
            right = self._processes.sum(task.right, of_all=True)
            metrics["eval_accuracy"] = right / len(self._held)
            said += f", accuracy {metrics['eval_accuracy']:.1%}"
        self.log(metrics)
        self._say(said)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _summed(
        self, compute: Callable[..., Tensor], texts: list[Tokens], when: str, **way: Any
    ) -> float:
        """The mean loss of the learned tokens of texts, computed by `backward` or `loss`; a
        LossError begins with `when`."""
        total, step, processes = 0.0, self.state.global_step, self._processes
        items = self._task.items(texts)
        batches = list(batched(texts, self._options.batch))
        with processes.apart():
            for index, batch in processes.share(batches):
                if compute is backward:
                    self._say(self._said, index / len(batches))
                # So that dropout does not depend on which process computes the batch.
                torch.manual_seed(seed_of(self._options.seed, step, index))
                try:
                    found = compute(
                        self.model,
                        batch.ids.to(processes.device),
                        cache=self._options.cache,
                        attention_mask=batch.mask.to(processes.device),
                        offload=self._offload,
                        group=processes.group,
                        **self._task.loss(self.model, batch, items, everywhere=processes.sharded),
                        **way,
                    )
                except LossError as error:
                    raise LossError(f"{when}: {error}") from error
                total += float(found)
        return processes.sum(total)

    # -- reports and checkpoints ------------------------------------------------------------

    def _say(self, doing: str, part: float = 0.0) -> None:
        """Report the current activity; `part` is the completed share of the next step."""
        self._said = doing
        if self._processes.leads:
            self._progress(doing, (self.state.global_step + part) / self.args.max_steps)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`. Also record the seconds of the run."""
        before = self.state.log_history[-1]["seconds"] if self.state.log_history else 0.0
        now = time.monotonic()
        logs["seconds"], self._clock = before + now - self._clock, now
        if "loss" in logs:
            logs["loss"] = self._loss  # the Trainer sums in float32
            step = f"step {self.state.global_step}/{self.args.max_steps}"
            self._say(f"{step}, loss {self._loss:.4f}, {self._rate:,.0f} tokens/s")
        super().log(logs, start_time)

    # The Trainer would pickle the optimizer's state, the random numbers' state and its own
    # arguments.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._checkpoints.save(self.model, self.optimizer, self.state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._processes.together():
            self._checkpoints.restore_weights(Path(resume_from_checkpoint), self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.state.compute_steps(self.args, self.state.max_steps)  # the arguments may have changed
        self._say(f"resuming after step {self.state.global_step}")
        with self._processes.together():
            self._checkpoints.restore_optimizer(Path(checkpoint), self.model, self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing to load."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing to load: random numbers depend only on the seed, the step and the batch."""

    def report(self) -> dict[str, Any]:
        """The return value of `finetune`, except the directory."""
        history = [x for x in self.state.log_history if "loss" in x or "eval_loss" in x]
        names = ["loss"] if self._task.right is None else ["loss", "accuracy"]
        evaluated = [
            {"step": one["step"], **{name: one[f"eval_{name}"] for name in names}}
            for one in history
            if "eval_loss" in one
        ]
        ends = {"untuned": evaluated[:1], "tuned": evaluated[-1:]}
        return {
            "cache": self._options.cache,
            "steps": self.state.global_step,
            "tokens": self.state.num_input_tokens_seen,
            "seconds": history[-1]["seconds"],
            "train_loss": [{"step": x["step"], "loss": x["loss"]} for x in history if "loss" in x],
            "eval_loss": [one for one in evaluated if one["step"]],
        } | {
            f"{end}_{name}": x[0][name] if x else None for end, x in ends.items() for name in names
        }


@contextmanager
def _alone() -> Iterator[None]:
    """Hide torchrun's processes from accelerate, and suppress its warning that it sees none."""
    hidden = {name: os.environ.pop(name) for name in _OF_LAUNCHERS if name in os.environ}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.update(hidden)
