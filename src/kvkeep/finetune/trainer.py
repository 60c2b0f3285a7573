"""transformers' Trainer for a run: its loop, schedule and state; losses are kvkeep's.

Processes divide a step as `Processes` says, and accelerate takes each of them for the only one.
So nothing wraps the model or moves it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import LossError
from kvkeep.extras import needed_by
from kvkeep.files.offload import Offload
from kvkeep.finetune.checkpoint import Checkpoints
from kvkeep.finetune.data import Tokens
from kvkeep.finetune.long_context import LongContext
from kvkeep.finetune.options import OptionError, Options, drawn
from kvkeep.finetune.processes import whole
from kvkeep.finetune.steps import Steps, turns
from kvkeep.finetune.task import Task
from kvkeep.host.progress import Progress

with needed_by("kvkeep.finetune", "finetune"):
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_utils import EvalLoopOutput

_OF_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE")


class FineTuner(LongContext, Trainer):
    """A run in progress.

    Args:
        model: the model to train; the parameters that require gradients are trained.
        checkpoints: where checkpoints are written to.
        texts: the pieces to train on, and those to evaluate on.
        resumed: whether `train` will resume from a checkpoint.
        progress: called during and after each step, in the leading process.

    Raises:
        OptionError: there is no such integration to report to, or it is not installed.
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
        self._task, self._options, self._checkpoints = task, options, checkpoints
        self._processes = checkpoints.processes
        train, held = texts
        self._held = len(held)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._loss, self._clock = 0.0, time.monotonic()
        steps = Steps(train, options, task, self._processes)
        leads = self._processes.leads
        with _alone():
            arguments = TrainingArguments(
                output_dir=str(checkpoints.out),
                per_device_train_batch_size=1,  # one of the turns of a step
                per_device_eval_batch_size=1,
                gradient_accumulation_steps=steps.turns,
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                optim="adamw_torch",
                eval_strategy="steps" if held else "no",
                eval_on_start=bool(held) and not resumed,
                save_strategy="steps",
                logging_steps=1,
                disable_tqdm=True,
                use_cpu=True,  # of the Trainer's own tensors
                use_cache=getattr(getattr(model, "config", None), "use_cache", True),
                **options.arguments(),
            )
            if not leads:
                arguments.report_to = []
            _require_installed(arguments.report_to)
            super().__init__(
                model=model,
                args=arguments,
                data_collator=itemgetter(0),
                train_dataset=steps,
                eval_dataset=turns(held, options.chunk, options.batch, task, self._processes),
                callbacks=[_Told(progress)] if leads else None,
                cache=options.cache,
                offload=Offload(options.host_bytes, options.spill),
            )
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False

    # -- losses -----------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """See `LongContext`. The last turn of a step sums the gradients of all processes."""
        step = self.state.global_step
        found = torch.zeros(())
        with self._processes.apart(), _named(f"step {step + 1}"):
            if inputs["batch"] is not None:
                # So that dropout is the same in whichever process the batch is computed.
                torch.manual_seed(drawn(self._options.seed, step, inputs["index"]))
                found = super().training_step(model, inputs).cpu() / self._share(None)
        self._loss += float(found)
        if self.accelerator.sync_gradients:
            self._processes.sum_gradients(self._trained)
            self.state.num_input_tokens_seen += inputs["tokens"]
        return found

    def _share(self, num_items: Any) -> float:
        return self._processes.scale

    def _asked(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch, processes = inputs["batch"], self._processes
        asked = self._task.loss(self.model, batch, inputs["items"], everywhere=processes.sharded)
        return {
            **self._way,
            "input_ids": batch.ids.to(processes.device),
            "attention_mask": batch.mask.to(processes.device),
            "chunk": inputs["chunk"],
            "group": processes.group,
            **asked,
        }

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = whole(torch.as_tensor(super()._get_grad_norm(model, grad_norm)))
        if not bool(torch.isfinite(norm)):
            raise LossError(
                f"step {self.state.global_step + 1}: the norm of the gradients is {float(norm)}, "
                f"the loss {self._loss}: no weight and no optimizer was changed; lower the "
                "learning rate, or compute in float32"
            )
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """transformers' schedule, one step later, because its first rate is 0; from the step on
        that was resumed from."""
        scheduler = super().create_scheduler(num_training_steps + 1, optimizer)
        scheduler.last_epoch = done = self.state.global_step + 1
        rates = [
            x * share(done)
            for x, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        return scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted."""
        return 0

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> EvalLoopOutput:
        """The mean loss of the texts to evaluate on, and the share of them that got their class."""
        self.model.eval()
        task, total = self._task, 0.0
        if task.right is not None:
            task.right = 0
        with self._processes.apart(), _named(f"evaluation after step {self.state.global_step}"):
            for inputs in dataloader:
                self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                if inputs["batch"] is not None:
                    total += float(self.prediction_step(self.model, inputs, True)[0])
        metrics = {"eval_loss": self._processes.sum(total)}
        if task.right is not None:
            right = self._processes.sum(task.right, of_all=True)
            metrics["eval_accuracy"] = right / self._held
        return EvalLoopOutput(None, None, metrics, self._held)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`. The losses of a step are summed, and the seconds of the run noted."""
        if "loss" in logs:
            logs["loss"] = self._processes.sum(self._loss)
            self._loss = 0.0
        before = self.state.log_history[-1]["seconds"] if self.state.log_history else 0.0
        now = time.monotonic()
        logs["seconds"], self._clock = before + now - self._clock, now
        super().log(logs, start_time)

    # -- checkpoints: the Trainer would pickle what is not a weight ---------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._checkpoints.save(self.model, self.optimizer, self.state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._processes.together():
            self._checkpoints.restore_weights(Path(resume_from_checkpoint), self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.state.compute_steps(self.args, self.state.max_steps)  # these may have changed
            with self._processes.together():
                self._checkpoints.restore_optimizer(Path(checkpoint), self.model, self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """There is none: random numbers are drawn from the seed, the step and the batch."""

    def report(self) -> dict[str, Any]:
        """What `finetune` returns, but for the directory."""
        history = [x for x in self.state.log_history if "loss" in x or "eval_loss" in x]
        evaluated = [
            {
                "step": x["step"],
                **{n: x[f"eval_{n}"] for n in ("loss", "accuracy") if f"eval_{n}" in x},
            }
            for x in history
            if "eval_loss" in x
        ]
        found = {
            "cache": self._options.cache,
            "steps": self.state.global_step,
            "tokens": self.state.num_input_tokens_seen,
            "seconds": history[-1]["seconds"],
            "train_loss": [{"step": x["step"], "loss": x["loss"]} for x in history if "loss" in x],
            "eval_loss": [one for one in evaluated if one["step"]],
        }
        for name in ("loss", "accuracy") if self._task.right is not None else ("loss",):
            found[f"untuned_{name}"] = evaluated[0][name] if evaluated else None
            found[f"tuned_{name}"] = evaluated[-1][name] if evaluated else None
        return found


class _Told(TrainerCallback):
    """Tells how far a run is."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._doing = progress, "training"

    def _say(self, doing: str, state: Any, part: float = 0.0) -> None:
        """`part`: the share of the next step that is done."""
        self._doing = doing
        self._progress(doing, (state.global_step + part) / state.max_steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part = 0
        if state.global_step:
            self._say(f"resuming after step {state.global_step}", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part, self._begun, self._tokens = 0, time.monotonic(), state.num_input_tokens_seen

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._part += 1
        self._say(self._doing, state, self._part / args.gradient_accumulation_steps)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._say("evaluating", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        step = state.global_step
        if "loss" in logs:
            rate = (state.num_input_tokens_seen - self._tokens) / (time.monotonic() - self._begun)
            loss = logs["loss"]
            self._say(
                f"step {step}/{state.max_steps}, loss {loss:.4f}, {rate:,.0f} tokens/s", state
            )
        elif "eval_loss" in logs:
            said = f"evaluated after step {step}, loss {logs['eval_loss']:.4f}"
            if "eval_accuracy" in logs:
                said += f", accuracy {logs['eval_accuracy']:.1%}"
            self._say(said, state)


@contextmanager
def _named(when: str) -> Iterator[None]:
    """Say of a LossError when it was raised."""
    try:
        yield
    except LossError as error:
        raise LossError(f"{when}: {error}") from error


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from accelerate the processes that torchrun started, and its warning that it sees
    none."""
    hidden = {name: os.environ.pop(name) for name in _OF_LAUNCHERS if name in os.environ}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.update(hidden)


def _require_installed(integrations: list[str]) -> None:
    """Raise OptionError unless figures can be reported to these."""
    try:
        for one in get_reporting_integration_callbacks(integrations):
            one()
    except (ValueError, RuntimeError, ImportError) as error:
        raise OptionError(f"report_to is {', '.join(integrations)}: {error}") from error
