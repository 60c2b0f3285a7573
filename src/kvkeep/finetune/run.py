"""`finetune`: train a model or a LoRA adapter through a cache, reproducibly and resumably."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import LossError
from kvkeep.files.offload import Offload
from kvkeep.finetune import checkpoint
from kvkeep.finetune.checkpoint import State
from kvkeep.finetune.data import Batch, DataError, Tokens, batched, digest, order, pieces, read
from kvkeep.finetune.full import Full
from kvkeep.finetune.lora import Lora
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.trained import Trained
from kvkeep.host import host_of
from kvkeep.train import backward, loss

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of the whole that is done, 0 to 1."""


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
    progress: Progress = lambda doing, share: None,
) -> dict[str, Any]:
    """Train a LoRA adapter, or all weights, on long texts, through the cache that the model will be
    served with.

    The loss on other texts is evaluated before and after training, through the same cache. The
    result depends only on data, options, model and machine: a run that was interrupted and resumed
    gives the same weights, on the CPU bit for bit.

    Args:
        model: the base model; it is changed: the adapter stays in it, or its weights are trained.
        tokenizer: the model's tokenizer.
        data: a JSON Lines file; see `kvkeep.finetune.data.read`.
        out: the directory of the result and of the checkpoints, `checkpoint-STEP`.
        evaluation: a file like `data`, to evaluate on.
        holdout: if there is no such file, the number of documents at the end of `data` to evaluate
            on instead of training on them; None: one if there are several. 0: no evaluation.
        resume: resume from the newest checkpoint in `out`, if there is one.
        progress: called during and after each step.

    Returns:
        `cache`, `steps`, `tokens` trained on, `seconds`, `train_loss` and `eval_loss` (a list of
        `step` and `loss`), `untuned_loss` and `tuned_loss` (None if nothing is evaluated), and
        `out`, the directory. Losses are means over learned tokens.

    Raises:
        OptionError: options that do not fit each other, the data or the model.
        DataError: a file of texts that cannot be trained on; no step was taken.
        CheckpointError: `out` cannot be written or resumed from, or holds a run and `resume` is
            not set.
        LossError: a loss or gradient is not finite. That step changed neither weights nor
            optimizer, and the checkpoints are kept.
    """
    host = host_of(model)
    options = options.checked().for_model(host)
    if evaluation is not None and holdout is not None:
        raise OptionError("an evaluation file and a holdout are both given; give one of them")
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise OptionError(
            "the model is in float16, in which gradients underflow; load it in bfloat16 or float32"
        )
    train, held = _texts(tokenizer, data, evaluation, holdout, options)
    options = options.for_data(len(train))
    matter = {**options.that_matter(), "data": digest(train), "evaluation": digest(held)}
    matter |= {checkpoint.MODEL + name: value for name, value in host.fingerprint().items()}
    kind = Full(tokenizer) if options.full else Lora()
    with checkpoint.claimed(out), torch.random.fork_rng():
        if not resume:
            checkpoint.require_unused(out, kind)
        found = checkpoint.newest(out, kind, matter) if resume else None
        torch.manual_seed(options.seed)
        run = _Run(kind, kind.prepare(model, options), options, train, held, progress)
        if found is None:
            run.begin(State(matter))
        else:
            state, path = found
            checkpoint.restore(path, kind, run.model, run.optimizer)
            run.go_on(state)
        try:
            run.train(out)
        finally:
            run.model.eval()
        checkpoint.save_result(out, kind, run.model)
    return {**_report(run.state, options), "out": str(out)}


class _Run:
    """A run in progress."""

    def __init__(
        self,
        kind: Trained,
        model: Any,
        options: Options,
        train: list[Tokens],
        held: list[Tokens],
        progress: Progress,
    ) -> None:
        self._kind, self.model, self._options = kind, model, options
        self._device = host_of(model).device
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
                    out, self._kind, self.model, self.optimizer, self.state, options.keep
                )

    def _step(self) -> None:
        state, options, begun = self.state, self._options, time.monotonic()
        texts = self._texts_of(state.step)
        items = sum(text.learned for text in texts)
        total = 0.0
        self.model.train()
        try:
            for index, batch in enumerate(batched(texts, options.batch)):
                self._say(self._said, index / options.accumulate)
                total += self._through(backward, batch, items, f"step {state.step + 1}")
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in self._parameters if p.grad is not None]
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
        step, total = self.state.step, 0.0
        self._say("evaluating")
        self.model.eval()
        items = sum(text.learned for text in self._held)
        for batch in batched(self._held, self._options.batch):
            total += self._through(loss, batch, items, f"evaluation after step {step}")
        self.state.eval_loss[str(step)] = total
        self._say(f"evaluated after step {step}, loss {total:.4f}")

    def _through(
        self, compute: Callable[..., Tensor], batch: Batch, items: int, when: str
    ) -> float:
        """The loss of a batch, computed by `backward` or `loss`; a LossError begins with `when`."""
        ids, labels, mask = batch
        device, options = self._device, self._options
        try:
            found = compute(
                self.model,
                ids.to(device),
                labels,
                cache=options.cache,
                chunk=options.chunk,
                attention_mask=mask.to(device),
                num_items=items,
                offload=self._offload,
            )
        except LossError as error:
            raise LossError(f"{when}: {error}") from error
        return float(found)

    def _say(self, doing: str, part: float = 0.0) -> None:
        """Report what is being done; `part` is the share of the next step that is done."""
        assert self._options.steps is not None
        self._said = doing
        self._progress(doing, (self.state.step + part) / self._options.steps)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.state.seconds += time.monotonic() - begun


def _texts(
    tokenizer: Any, data: Path, evaluation: Path | None, holdout: int | None, options: Options
) -> tuple[list[Tokens], list[Tokens]]:
    """The pieces to train on, and the pieces to evaluate on."""
    assert options.length is not None
    documents = read(data, tokenizer)
    if evaluation is not None:
        held = read(evaluation, tokenizer)
    else:
        kept = min(1, len(documents) - 1) if holdout is None else holdout
        if not 0 <= kept < len(documents):
            raise OptionError(
                f"a holdout of {kept} documents, but {data} has {len(documents)}; use one of at "
                f"most {len(documents) - 1}"
            )
        cut = len(documents) - kept
        documents, held = documents[:cut], documents[cut:]
    train, tested = pieces(documents, options.length), pieces(held, options.length)
    for path, given, found in ((data, documents, train), (evaluation or data, held, tested)):
        if given and not found:
            raise DataError(
                f"{path}: nothing to learn in pieces of {options.length} tokens; give documents "
                "of at least 2 tokens, and a length that reaches the assistant's answers"
            )
    return train, tested


def _report(state: State, options: Options) -> dict[str, Any]:
    evaluated = [{"step": int(step), "loss": x} for step, x in state.eval_loss.items()]
    return {
        "cache": options.cache,
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "train_loss": [{"step": n, "loss": x} for n, x in enumerate(state.train_loss, 1)],
        "eval_loss": [one for one in evaluated if one["step"]],
        "untuned_loss": evaluated[0]["loss"] if evaluated else None,
        "tuned_loss": evaluated[-1]["loss"] if evaluated else None,
    }
