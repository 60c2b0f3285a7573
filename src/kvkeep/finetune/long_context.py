"""LongContext: transformers' Trainer and its subclasses with gradients through a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.files.offload import Offload
from kvkeep.host import Specs
from kvkeep.train.gradient import Way, backward, loss

_Trainer: Any = object  # the trainer follows in the method resolution order

_TEXT = frozenset({"input_ids", "attention_mask", "labels"})


class LongContext(_Trainer):  # type: ignore[misc]
    """A mixin for a trainer: `class LongTrainer(LongContext, Trainer): pass`, or with TRL's
    `SFTTrainer`. `kvkeep.train` computes losses and gradients; the trainer does everything else.

    Args:
        cache, chunk, offload: see `kvkeep.train.backward`.

    Raises:
        UnsupportedError: a loss other than cross entropy, such as DPO's and GRPO's; in training or
            evaluation, inputs other than texts, labels and padding (such as the positions of
            packed texts), and metrics that need logits.
    """

    def __init__(
        self,
        *args: Any,
        cache: Specs = "keep_all",
        chunk: int | None = None,
        offload: Offload | None = None,
        **options: Any,
    ) -> None:
        self._way = Way(cache=cache, chunk=chunk, offload=offload)
        super().__init__(*args, **options)
        other = {
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss_func": self.compute_loss_func is not None,
            "loss_type": getattr(self.args, "loss_type", None) not in (None, "nll"),
        }
        if any(other.values()):
            names = ", ".join(name for name in other if other[name])
            raise UnsupportedError(
                f"{names}: LongContext computes the gradients of cross entropy alone; leave it "
                f"out, or leave LongContext out of {type(self).__name__}"
            )

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Add the gradients of a batch, and return its loss."""
        model.train()
        begin = getattr(self.optimizer, "train", None)
        if callable(begin):  # a schedule-free optimizer
            begin()
        text = self._text(inputs)
        share = 1.0
        if num_items_in_batch is None:
            share /= self.current_gradient_accumulation_steps
        elif self.args.average_tokens_across_devices:  # counted over processes, averaged over them
            share *= self.accelerator.num_processes
        scaler = self.accelerator.scaler
        scale = share if scaler is None else share * scaler.get_scale()
        with self.compute_loss_context_manager():
            found = backward(model, **text, num_items=num_items_in_batch, scale=scale, **self._way)
        return found * share

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """The loss of a batch."""
        if not prediction_loss_only:
            what = "logits of whole texts are never held, so metrics cannot be computed"
            raise UnsupportedError(f"{what}; set prediction_loss_only, and no compute_metrics")
        with torch.no_grad(), self.compute_loss_context_manager():
            return loss(model, **self._text(inputs), **self._way), None, None

    def _text(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = self._prepare_inputs(inputs)
        if set(prepared) - _TEXT or "labels" not in prepared:
            raise UnsupportedError(
                f"LongContext trains on {sorted(_TEXT)}, but its trainer gives {sorted(prepared)}; "
                "use a trainer of cross entropy, and a collator that pads texts and packs none"
            )
        return prepared
