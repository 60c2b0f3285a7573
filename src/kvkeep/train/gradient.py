"""`backward`: gradients of texts of any length, computed through a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from kvkeep.errors import ShapeError, StateError
from kvkeep.files.offload import Offload
from kvkeep.host import Specs, host_of
from kvkeep.host.layerwise import Layerwise
from kvkeep.train.autograd import average
from kvkeep.train.chain import Chain, Group
from kvkeep.train.losses import HiddenLoss, head_for, loss_and_gradients, restored_on_failure
from kvkeep.train.replay import Decisions
from kvkeep.train.walk import OnLayer, Walk


class Way(TypedDict, total=False):
    """How texts are fed through the cache; see `backward`."""

    cache: Specs
    chunk: int | None
    attention_mask: Tensor | None
    on_layer: OnLayer | None
    offload: Offload | None
    group: Group | None


def backward(
    model: Any,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    loss_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    head: HiddenLoss | None = None,
    scale: float = 1.0,
    decisions: Decisions | None = None,
    **way: Unpack[Way],
) -> Tensor:
    """Add the gradients of a loss to `.grad` of all parameters that require them; return the loss.

    The texts are fed through the cache chunk by chunk, as in generation. The forward decides
    evictions; the backward treats them as constants and repeats them, and a slot's gradient flows
    back to the token written there. A lossy codec passes gradients through unchanged
    (straight-through estimator). `keep_all` gives the gradients of full attention. Only one layer's
    cache is in memory at a time, so memory depends on the budget and the chunk size; layer inputs
    are kept in host memory or in a file.

    Source: keys_values (gradients through a KV cache).

    Dropout draws from torch's generator as usual. `torch.autocast` applies as usual.

    Args:
        model: a model of any library with a kvkeep host, with or without adapters, attached or not.
        input_ids: token ids (B, T), any T.
        labels: (B, T); see `TokenHead`.
        loss_weights: (B, T), the weight of each label.
        num_items: divisor of the summed losses; None: the sum of the weights.
        head: a loss of hidden states, instead of labels.
        scale: factor on the gradients, such as a GradScaler's; the returned loss is not scaled.
        decisions: a list to which each layer's evictions are appended; see `replaying`. With a
            group, only the evictions of this process's chunks.
        cache: cache spec; see `kvkeep.Cache`.
        chunk: tokens computed at once; None: 1,024, but at most the budget and the policy's step.
        attention_mask: (B, T), 0 for padding.
        on_layer: called before each layer runs on a chunk.
        offload: where layer inputs are kept; None: `Offload()`.
        group: processes that share these texts (context parallelism). Each process calls this
            function with the same arguments and computes some of the chunks: only for these it
            keeps layer inputs and calls `on_layer` and `head`. All processes get the full loss and
            gradients. If a process raises while it computes the loss, all raise; after any other
            error it must exit, because the other processes wait for it.

    Returns:
        The loss, detached.

    Raises:
        ShapeError: shapes of texts and labels differ, `chunk` exceeds a budget or step, or the
            processes of a group have different texts.
        SpecError: the spec does not exist or does not fit the model.
        LossError: the loss is not finite; no gradient was changed.
        PeerError: another process of the group raised while it computed the loss.
        StateError: gradient checkpointing or inference mode is on, attention has dropout, or the
            model is sharded over the group.
        UnsupportedError: the model cannot be run layer by layer.
    """
    if torch.is_inference_mode_enabled():
        raise StateError("there are no gradients in torch.inference_mode(); call backward outside")
    with _walk(model, input_ids, **way) as (decoder, walk, store):
        objective = head_for(decoder, labels, loss_weights, num_items, head)
        own = list(head.parameters()) if isinstance(head, nn.Module) else []
        # Collected before FSDP2 gathers any parameter, so these are the shards.
        trained, outside = [*decoder.model.parameters(), *own], [*decoder.outside_layers, *own]
        walk.forward()
        if decisions is not None:
            decisions += walk.decisions
        with walk.chain.summed(trained):
            with restored_on_failure(outside), walk.chain.together():
                loss, gradients = loss_and_gradients(
                    decoder, objective, walk.chunks, walk.outputs, store, scale
                )
            try:
                walk.backward(gradients)
            except BaseException as error:
                error.add_note("some gradients were changed; call zero_grad() before you continue")
                raise
    average(model)
    return walk.chain.sum(loss)


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
    """The loss that `backward` would return, without computing gradients."""
    with _walk(model, input_ids, **way) as (decoder, walk, store):
        objective = head_for(decoder, labels, loss_weights, num_items, head)
        walk.forward(trained=False)
        with walk.chain.together():
            own = loss_and_gradients(decoder, objective, walk.chunks, walk.outputs, store, None)[0]
        return walk.chain.sum(own)


def hidden_states(model: Any, input_ids: Tensor, **way: Unpack[Way]) -> Tensor:
    """The hidden states of the texts after the final norm, (B, T, width); with a group, of this
    process's chunks. No logits and no gradients are computed."""
    with _walk(model, input_ids, **way) as (decoder, walk, store), torch.no_grad():
        walk.forward(trained=False)
        outputs = zip(walk.chunks, walk.outputs, strict=True)
        return torch.cat([decoder.hidden(at, store.take(x)) for at, x in outputs], dim=1)


@contextmanager
def _walk(
    model: Any,
    input_ids: Tensor,
    cache: Specs = "keep_all",
    chunk: int | None = None,
    attention_mask: Tensor | None = None,
    on_layer: OnLayer | None = None,
    offload: Offload | None = None,
    group: Group | None = None,
) -> Iterator[tuple[Layerwise, Walk, Offload]]:
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise ShapeError(
            f"input_ids {tuple(input_ids.shape)} {input_ids.dtype}; give token ids (B, T)"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ShapeError(
            f"attention_mask {tuple(attention_mask.shape)} for texts {tuple(input_ids.shape)}; "
            "give one number for each token"
        )
    host, store = host_of(model), offload or Offload()
    chain = Chain(group, model, input_ids)
    try:
        with host.layerwise(input_ids, attention_mask) as decoder:
            yield decoder, Walk(host, decoder, cache, chunk, store, chain, on_layer), store
    finally:
        store.close()
