"""`backward`: the gradients of texts of any length, through the cache they will be served with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from kvkeep.errors import ShapeError, StateError
from kvkeep.files.offload import Offload
from kvkeep.hf.layerwise import Apart, average
from kvkeep.hf.losses import HiddenLoss, head_for, kept_on_failure, through
from kvkeep.hf.replayed import Decisions
from kvkeep.hf.specs import Specs
from kvkeep.train.walk import OnLayer, Walk


class Way(TypedDict, total=False):
    """How texts go through the cache; see `backward`."""

    cache: Specs
    chunk: int | None
    attention_mask: Tensor | None
    on_layer: OnLayer | None
    offload: Offload | None


def backward(
    model: Any,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    cache: Specs = "keep_all",
    chunk: int | None = None,
    attention_mask: Tensor | None = None,
    loss_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    head: HiddenLoss | None = None,
    scale: float = 1.0,
    on_layer: OnLayer | None = None,
    decisions: Decisions | None = None,
    offload: Offload | None = None,
) -> Tensor:
    """Add the gradients of a loss to `.grad` of whatever requires them, and return the loss.

    The texts go through the cache chunk by chunk, as they would when the model is served; what its
    policy evicts is decided once and then held constant, and going back the gradient of a slot ends
    where its token came. A codec that loses something passes gradients as the identity would: to
    name one here is to ask for that. `keep_all` gives the gradients of ordinary full attention. One
    layer's cache is held at a time, so that memory depends on budget and chunk; what the layers got
    waits in host memory or in a file. Source: keys_values' gradients through caches.

    Dropout draws from torch's generator as it stands. Under `torch.autocast`, all is as it says.

    Args:
        model: a transformers model, or a PEFT model around one; attached or not.
        input_ids: (B, T), any T.
        labels: (B, T); see `TokenHead`.
        cache: what is kept; see `kvkeep.Cache`.
        chunk: tokens that are computed at once; None: 1,024, or the budget if that is less.
        attention_mask: (B, T), 0 for padding.
        loss_weights: (B, T), of each label.
        num_items: what the summed losses are divided by; None: the sum of the weights.
        head: a loss of hidden states in place of labels.
        scale: of the gradients, not of the loss that is returned; a GradScaler's, for instance.
        on_layer: told what each layer is about to get.
        decisions: a list to which each layer's evictions are added; see `replaying`.
        offload: where layer inputs wait meanwhile; None: `Offload()`.

    Returns:
        The loss, without gradients.

    Raises:
        ShapeError: texts, labels, chunk and budget that do not fit each other.
        SpecError: the spec does not exist or does not fit the model.
        LossError: the loss is not finite; no gradient was changed.
        StateError: gradient checkpointing or inference mode is on, or attention has dropout.
        UnsupportedError: a model that cannot be taken apart.
    """
    if torch.is_inference_mode_enabled():
        raise StateError("there are no gradients in torch.inference_mode(); call backward outside")
    way = cache, chunk, attention_mask, on_layer, offload
    with _walk(model, input_ids, *way) as (parts, walk, store):
        found = head_for(parts, labels, loss_weights, num_items, head)
        walk.forward()
        if decisions is not None:
            decisions += walk.decisions
        own = list(head.parameters()) if isinstance(head, nn.Module) else []
        with kept_on_failure([*parts.beside, *own]):
            loss, gradients = through(parts, found, walk.chunks, walk.outputs, store, scale)
        try:
            walk.backward(gradients)
        except BaseException as error:
            error.add_note("some gradients were changed already: zero_grad() before going on")
            raise
    average(model)
    return loss


def loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    loss_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    head: HiddenLoss | None = None,
    **way: Unpack[Way],
) -> Tensor:
    """The loss that `backward` would return, and nothing else."""
    with _walk(model, input_ids, **way) as (parts, walk, store):
        found = head_for(parts, labels, loss_weights, num_items, head)
        walk.forward(trained=False)
        return through(parts, found, walk.chunks, walk.outputs, store, None)[0]


def hidden_states(model: Any, input_ids: Tensor, **way: Unpack[Way]) -> Tensor:
    """What the model's last norm leaves of the texts, (B, T, width). No logits are computed, and no
    gradients."""
    with _walk(model, input_ids, **way) as (parts, walk, store), torch.no_grad():
        walk.forward(trained=False)
        outputs = zip(walk.chunks, walk.outputs, strict=True)
        return torch.cat([parts.hidden(at, store.take(x)) for at, x in outputs], dim=1)


@contextmanager
def _walk(
    model: Any,
    input_ids: Tensor,
    cache: Specs = "keep_all",
    chunk: int | None = None,
    attention_mask: Tensor | None = None,
    on_layer: OnLayer | None = None,
    offload: Offload | None = None,
) -> Iterator[tuple[Apart, Walk, Offload]]:
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise ShapeError(
            f"input_ids {tuple(input_ids.shape)} {input_ids.dtype}; give token ids (B, T)"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ShapeError(
            f"attention_mask {tuple(attention_mask.shape)} for texts {tuple(input_ids.shape)}; "
            "give one number for each token"
        )
    store = offload or Offload()
    try:
        with Apart(model, input_ids, attention_mask) as parts:
            yield parts, Walk(parts, cache, chunk, store, on_layer), store
    finally:
        store.close()
