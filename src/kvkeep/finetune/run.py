"""`finetune`: train a model or a LoRA adapter through a cache, reproducibly and resumably."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from kvkeep.arguments import suggests
from kvkeep.finetune.checkpoint import Checkpoints
from kvkeep.finetune.classify import Classes
from kvkeep.finetune.data import digest
from kvkeep.finetune.full import Full
from kvkeep.finetune.lora import Lora
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.processes import Processes
from kvkeep.finetune.task import NextToken, divided
from kvkeep.finetune.trained import Trained
from kvkeep.finetune.trainer import FineTuner
from kvkeep.host import Host, host_of
from kvkeep.host.progress import Progress, silent
from kvkeep.libraries import LIBRARIES, class_at


@suggests(Options)
def finetune(
    model: Any,
    tokenizer: Any,
    data: Path,
    out: Path,
    options: Options,
    *,
    resume: bool = False,
    device: torch.device | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a LoRA adapter, or all weights, on long texts, through the cache that will serve the
    model.

    The loss on held-out texts is evaluated before and after training, through the same cache. The
    result depends only on data, options, model and machine: an interrupted and resumed run gives
    the same weights, on the CPU bit for bit.

    Where `torch.distributed` is initialised, all its processes must call this function with the
    same arguments. They divide each step's batches, and the result is the same up to rounding. All
    processes must see the files; the first process writes and reports. A process that raises an
    error while it computes with a sharded model or a shared text must exit, because the others wait
    for it.

    Args:
        model: the base model; it is changed: the adapter stays in it, or its weights are trained.
        tokenizer: the model's tokenizer.
        data: a JSON Lines file; see `kvkeep.finetune.data.read`.
        out: the directory of the result and of the checkpoints, `checkpoint-STEP`.
        resume: resume from the newest checkpoint in `out`, if there is one.
        device: where to compute; None: the model's device. A model that will be sharded may be in
            host memory.
        progress: called during and after each step, in the first process.

    Returns:
        `cache`, `steps`, `tokens` trained on, `seconds`, `train_loss` and `eval_loss` (a list of
        `step` and `loss`), `untuned_loss` and `tuned_loss` (None if nothing is evaluated), and
        `out`, the directory. Losses are means over learned tokens. For classes also
        `untuned_accuracy` and `tuned_accuracy`, and an `accuracy` in `eval_loss`; losses are then
        means over texts.

    Raises:
        OptionError: options do not fit each other, the data or the model.
        DataError: a file of texts cannot be used for training; no step was taken.
        CheckpointError: `out` cannot be written or resumed from, or holds a run and `resume` is
            not set.
        PeerError: another process raised an error.
        LossError: a loss or gradient is not finite. That step changed neither weights nor
            optimizer, and the checkpoints are kept.
    """
    host = host_of(model)
    options = options.checked()
    place = device or host.device
    processes = Processes(place, options)
    with processes.together():
        options = options.for_model(host)
        if any(p.dtype == torch.float16 for p in model.parameters()):
            what = "the model is in float16, in which gradients underflow"
            raise OptionError(f"{what}; load it in bfloat16 or float32")
        assert options.length is not None
        kind_of_task = Classes if options.task == "classify" else NextToken
        task = kind_of_task(model, tokenizer, options.length)
        texts = divided(task, data, options.evaluation, options.holdout)
        options = options.for_data(len(texts[0]))
        matter = options.that_matter()
        matter |= {"data": digest(texts[0]), "evaluation": digest(texts[1])}
        kind = Full(tokenizer) if options.full else _adapter_of(host)
        checkpoints = Checkpoints(out, kind, matter, host.fingerprint(), options.keep, processes)
    with ExitStack() as stack:
        step = 0
        with processes.together():
            if processes.leads:
                stack.enter_context(checkpoints.claimed())
                if resume:
                    step = checkpoints.newest()
                else:
                    checkpoints.require_unused()
        step = int(processes.sum(step, of_all=True))
        stack.enter_context(torch.random.fork_rng())
        with processes.together():
            torch.manual_seed(options.seed)
            tuned = kind.prepare(model, options)
            if options.offload or (options.full and processes.count > 1):
                processes.shard(tuned)
            else:
                tuned.to(place)
            trainer = FineTuner(
                tuned, task, options, checkpoints, texts, resumed=step > 0, progress=progress
            )
        try:
            trainer.train(str(checkpoints.at(step)) if step else None)
        finally:
            tuned.eval()
            tuned.zero_grad()
        checkpoints.copy_result(trainer.state.global_step)
    return {**trainer.report(), "out": str(out)}


def _adapter_of(host: Host) -> Trained:
    """The library's own adapters, or PEFT's LoRA."""
    own = [one.adapter for one in LIBRARIES.values() if one.title == host.library]
    return cast(Trained, class_at(own[0])()) if any(own) else Lora()
