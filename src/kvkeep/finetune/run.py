"""`finetune`: train a model or a LoRA adapter through a cache, reproducibly and resumably."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import LossError
from kvkeep.files.offload import Offload
from kvkeep.finetune import checkpoint
from kvkeep.finetune.checkpoint import State
from kvkeep.finetune.classify import Classes
from kvkeep.finetune.data import Batch, Tokens, batched, digest, order
from kvkeep.finetune.full import Full
from kvkeep.finetune.kinds import lora_of
from kvkeep.finetune.options import OptionError, Options, drawn
from kvkeep.finetune.processes import Processes, whole
from kvkeep.finetune.task import NextToken, Task, divided
from kvkeep.finetune.trained import Trained
from kvkeep.host import host_of
from kvkeep.host.progress import Progress, silent
from kvkeep.train import backward, loss


def finetune(
    model: Any,
    tokenizer: Any,
    data: Path,
    out: Path,
    options: Options,
    *,
    evaluation: Path | None = None,
    holdout: int | None = None,
    resume: bool = False,
    device: torch.device | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a LoRA adapter, or all weights, on long texts, through the cache that the model will be
    served with.

    The loss on other texts is evaluated before and after training, through the same cache. The
    result depends only on data, options, model and machine: a run that was interrupted and resumed
    gives the same weights, on the CPU bit for bit.

    Where `torch.distributed` is initialised, all its processes must call this function with the
    same arguments. They divide each step's batches, and the result is the same up to rounding. All
    of them must see the files; the first one writes and reports. If one raises an error while it
    computes with a sharded model or a shared text, it must exit, because the others wait for it.

    Args:
        model: the base model; it is changed: the adapter stays in it, or its weights are trained.
        tokenizer: the model's tokenizer.
        data: a JSON Lines file; see `kvkeep.finetune.data.read`.
        out: the directory of the result and of the checkpoints, `checkpoint-STEP`.
        evaluation: a file like `data`, to evaluate on.
        holdout: if there is no such file, the number of documents at the end of `data` to evaluate
            on instead of training on them; None: one if there are several. 0: no evaluation.
        resume: resume from the newest checkpoint in `out`, if there is one.
        device: where to compute; None: where the model lies. A model that will be sharded may lie
            in host memory.
        progress: called during and after each step, in the first process.

    Returns:
        `cache`, `steps`, `tokens` trained on, `seconds`, `train_loss` and `eval_loss` (a list of
        `step` and `loss`), `untuned_loss` and `tuned_loss` (None if nothing is evaluated), and
        `out`, the directory. Losses are means over learned tokens. For classes also
        `untuned_accuracy` and `tuned_accuracy`, and an `accuracy` in `eval_loss`; losses are then
        means over texts.

    Raises:
        OptionError: options that do not fit each other, the data or the model.
        DataError: a file of texts that cannot be trained on; no step was taken.
        CheckpointError: `out` cannot be written or resumed from, or holds a run and `resume` is
            not set.
        PeerError: another process raised an error.
        LossError: a loss or gradient is not finite. That step changed neither weights nor
            optimizer, and the checkpoints are kept.
    """
    host = host_of(model)
    options = options.checked()
    place = device or host.device
    processes = Processes(place, options.context_parallel, offload=options.offload)
    with processes.together():
        options = options.for_model(host).for_processes(processes.count)
        if evaluation is not None and holdout is not None:
            raise OptionError("an evaluation file and a holdout are both given; give one of them")
        if any(p.dtype == torch.float16 for p in model.parameters()):
            raise OptionError(
                "the model is in float16, in which gradients underflow; load it in bfloat16 or "
                "float32"
            )
        assert options.length is not None
        task = (Classes if options.task == "classify" else NextToken)(
            model, tokenizer, options.length
        )
        train, held = divided(task, data, evaluation, holdout)
        options = options.for_data(len(train))
        matter = {**options.that_matter(), "data": digest(train), "evaluation": digest(held)}
        matter |= {checkpoint.MODEL + name: value for name, value in host.fingerprint().items()}
    kind = Full(tokenizer) if options.full else lora_of(host)
    with ExitStack() as stack:
        found = _claim(stack, out, kind, matter, resume, processes)
        stack.enter_context(torch.random.fork_rng())
        with processes.together():
            torch.manual_seed(options.seed)
            tuned = kind.prepare(model, options)
            if options.offload or (options.full and processes.count > 1):
                processes.shard(tuned)
            else:
                tuned.to(place)
            run = _Run(kind, task, tuned, options, processes, train, held, progress)
            if found is not None:
                checkpoint.restore(found[1], kind, run.model, run.optimizer)
        if found is None:
            run.begin(State(matter))
        else:
            run.go_on(found[0])
        try:
            run.train(out)
        finally:
            run.model.eval()
        checkpoint.save_result(out, kind, run.model, processes)
    return {**_report(run.state, options), "out": str(out)}


def _claim(
    stack: ExitStack,
    out: Path,
    kind: Trained,
    matter: dict[str, Any],
    resume: bool,
    processes: Processes,
) -> tuple[State, Path] | None:
    """Lock the directory of a run until the stack is closed; returns the checkpoint to resume from,
    if there is one.

    Raises:
        CheckpointError: see `finetune`.
    """
    found = None
    with processes.together():
        if processes.leads:
            stack.enter_context(checkpoint.claimed(out))
            if not resume:
                checkpoint.require_unused(out, kind)
            else:
                found = checkpoint.newest(out, kind, matter)
    step = processes.told(-1 if found is None else found[0].step)
    with processes.together():
        if not processes.leads and step >= 0:
            found = checkpoint.at(out, step)
    return found


class _Run:
    """A run in progress."""

    def __init__(
        self,
        kind: Trained,
        task: Task,
        model: Any,
        options: Options,
        processes: Processes,
        train: list[Tokens],
        held: list[Tokens],
        progress: Progress,
    ) -> None:
        self._kind, self._task, self.model, self._options = kind, task, model, options
        self._processes = processes
        self._train, self._held, self._progress = train, held, progress
        self._said = "training"
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self._parameters, weight_decay=0.0)
        self._offload = Offload(options.host_bytes, options.spill)

    def begin(self, state: State) -> None:
        """Start a run, by evaluating the model before it is trained."""
        self.state = state
        with self._timed():
            self._evaluate()

    def go_on(self, state: State) -> None:
        """Resume from a checkpoint whose weights are in the model already."""
        self.state = state
        self._say(f"resuming after step {state.step}")

    def train(self, out: Path) -> None:
        """Train to the last step, and save the checkpoints on the way and at the end."""
        options, last = self._options, self._options.steps
        assert last is not None
        while self.state.step < last:
            with self._timed():
                self._step()
                step = self.state.step
                if step == last or (options.eval_every and step % options.eval_every == 0):
                    self._evaluate()
            if step == last or (options.save_every and step % options.save_every == 0):
                checkpoint.save(
                    out,
                    self._kind,
                    self.model,
                    self.optimizer,
                    self.state,
                    options.keep,
                    self._processes,
                )

    def _step(self) -> None:
        state, options, begun = self.state, self._options, time.monotonic()
        texts, processes = self._texts_of(state.step), self._processes
        way = {"chunk": options.chunk_of(state.step), "scale": processes.scale}
        self.model.train()
        try:
            total = self._summed(backward, texts, f"step {state.step + 1}", **way)
            processes.sum_gradients(self._parameters)
            norm = whole(
                torch.nn.utils.get_total_norm(
                    [p.grad for p in self._parameters if p.grad is not None]
                )
            )
            if not bool(torch.isfinite(norm)):
                raise LossError(
                    f"step {state.step + 1}: the norm of the gradients is {float(norm)}, the loss "
                    f"{total}: no weight and no optimizer was changed; lower the learning rate, "
                    "or compute in float32"
                )
            if options.clip:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, options.clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = options.rate(state.step)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        tokens = sum(len(text.ids) for text in texts)
        state.step += 1
        state.tokens += tokens
        state.train_loss.append(total)
        rate = tokens / (time.monotonic() - begun)
        self._say(f"step {state.step}/{options.steps}, loss {total:.4f}, {rate:,.0f} tokens/s")

    def _texts_of(self, step: int) -> list[Tokens]:
        """The pieces of a step: the next ones in the epoch's order, and after its last piece the
        first ones of the next epoch."""
        options, count = self._options, len(self._train)
        size = options.batch * options.accumulate
        stop = (step + 1) * size
        if options.epochs is not None:
            stop = min(stop, options.epochs * count)
        orders: dict[int, list[int]] = {}
        found = []
        for place in range(step * size, stop):
            epoch, index = divmod(place, count)
            if epoch not in orders:
                orders[epoch] = order(count, options.seed, epoch)
            found.append(self._train[orders[epoch][index]])
        return found

    def _evaluate(self) -> None:
        if not self._held:
            return
        self._say("evaluating")
        self.model.eval()
        step = self.state.step
        when = f"evaluation after step {step}"
        if self._task.right is not None:
            self._task.right = 0
        total = self._summed(loss, self._held, when, chunk=self._options.chunk)
        self.state.eval_loss[str(step)] = total
        said = f"evaluated after step {step}, loss {total:.4f}"
        if self._task.right is not None:
            share = self._processes.sum_of_all(self._task.right) / len(self._held)
            self.state.eval_accuracy[str(step)] = share
            said += f", accuracy {share:.1%}"
        self._say(said)

    def _summed(
        self, compute: Callable[..., Tensor], texts: list[Tokens], when: str, **way: Any
    ) -> float:
        """The mean loss of the learned tokens of texts, computed by `backward` or `loss`; a
        LossError begins with `when`."""
        total, step, options = 0.0, self.state.step, self._options
        items = self._task.items(texts)
        batches = list(batched(texts, options.batch))
        # While processes compute together, one that fails cannot wait for the others.
        joint = self._processes.sharded or self._processes.group is not None
        with nullcontext() if joint else self._processes.together():
            for index, batch in self._processes.share(batches):
                if compute is backward:
                    self._say(self._said, index / len(batches))
                # So that dropout is the same in whichever process the batch is computed.
                torch.manual_seed(drawn(options.seed, step, index))
                try:
                    total += self._through(compute, batch, items, **way)
                except LossError as error:
                    raise LossError(f"{when}: {error}") from error
        return self._processes.sum(total)

    def _through(
        self, compute: Callable[..., Tensor], batch: Batch, items: int, **way: Any
    ) -> float:
        """The loss of a batch."""
        processes = self._processes
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
        return float(found)

    def _say(self, doing: str, part: float = 0.0) -> None:
        """Report what is being done; `part` is the share of the next step that is done."""
        assert self._options.steps is not None
        self._said = doing
        if self._processes.leads:
            self._progress(doing, (self.state.step + part) / self._options.steps)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.state.seconds += time.monotonic() - begun


def _report(state: State, options: Options) -> dict[str, Any]:
    evaluated = [{"step": int(step), "loss": x} for step, x in state.eval_loss.items()]
    for one, share in zip(evaluated, state.eval_accuracy.values(), strict=False):
        one["accuracy"] = share
    report = {
        "cache": options.cache,
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "train_loss": [{"step": n, "loss": x} for n, x in enumerate(state.train_loss, 1)],
        "eval_loss": [one for one in evaluated if one["step"]],
    }
    for name in ("loss", "accuracy") if options.task == "classify" else ("loss",):
        report[f"untuned_{name}"] = evaluated[0][name] if evaluated else None
        report[f"tuned_{name}"] = evaluated[-1][name] if evaluated else None
    return report
