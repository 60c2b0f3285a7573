"""Computes the loss and its gradients from the last layer's outputs, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from kvkeep.errors import LossError, ShapeError
from kvkeep.files.offload import Kept, Offload
from kvkeep.host.layerwise import Layerwise
from kvkeep.train.autograd import accumulate, is_sharded, reduces

HiddenLoss = Callable[[Tensor, slice], Tensor | None]
"""A caller's own loss: hidden states (B, n, width) after the final norm, and their columns -> their
part of the loss; None: they have no part in it."""

IGNORED = -100
"""Label of tokens that are not learned."""

_LOGITS = 1 << 23
"""Most logits in memory at once."""


class Head(Protocol):
    """Computes a loss from the last layer's outputs."""

    def pieces(self, columns: slice) -> Iterator[slice]:
        """The columns of a chunk that contribute to the loss, in pieces computed one by one."""

    def loss(self, columns: slice, hidden: Tensor) -> Tensor | None:
        """The part of `columns` in the loss, from the last layer's output (B, n, width); None: they
        have no part in it."""


class TokenHead:
    """Cross entropy of the next token, with the model's own language model head.

    Args:
        labels: (B, T), each token's own id, or -100. As in transformers, a label is predicted from
            the token before it. Padding is never learned.
        weights: (B, T), the weight of each label; None: 1 for all.
        num_items: divisor of the sum; None: the sum of the weights. With a divisor, a batch may
            have no labels to learn.

    Raises:
        ShapeError: shapes do not match the texts, a label is not in the vocabulary, or there are no
            labels to learn.
    """

    def __init__(
        self,
        decoder: Layerwise,
        labels: Tensor,
        weights: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> None:
        shape = decoder.input_ids.shape
        for name, given in (("labels", labels), ("loss_weights", weights)):
            if given is not None and given.shape != shape:
                raise ShapeError(
                    f"{name} {tuple(given.shape)} for texts {tuple(shape)}; give one per token"
                )
        device = decoder.input_ids.device
        targets = nn.functional.pad(labels.to(device).long()[:, 1:], (0, 1), value=IGNORED)
        learned = targets != IGNORED
        if decoder.attention_mask is not None:
            learned &= nn.functional.pad(decoder.attention_mask[:, 1:].bool(), (0, 1))
        each = torch.ones(shape, device=device) if weights is None else weights.to(device)
        each = nn.functional.pad(each[:, 1:], (0, 1))
        self._targets = targets.masked_fill(~learned, IGNORED)
        self._weights = each.masked_fill(~learned, 0)
        _require_known(self._targets[learned], decoder.vocabulary)
        total = self._weights.sum() if num_items is None else torch.as_tensor(num_items)
        if num_items is None and not bool(self._weights.any()):
            raise ShapeError(
                f"none of {labels.numel()} labels is learned: each is {IGNORED}, on padding, of "
                "weight 0, or on the first token of its text, which no token predicts; label some "
                "tokens with their ids"
            )
        if not float(total) > 0:
            raise ShapeError(
                f"the losses would be divided by {float(total)}, "
                + ("the sum of their weights; give num_items" if num_items is None else "num_items")
                + ", a number above 0"
            )
        self._total = total.to(device)
        self._decoder = decoder
        # Processes that share a model's weights must compute equally many pieces, or they deadlock.
        self._all = is_sharded(decoder.model)
        self._tokens = max(1, _LOGITS // (shape[0] * decoder.vocabulary))

    def pieces(self, columns: slice) -> Iterator[slice]:
        for start in range(columns.start, columns.stop, self._tokens):
            piece = slice(start, min(start + self._tokens, columns.stop))
            if self._all or bool(self._weights[:, piece].any()):
                yield piece

    def loss(self, columns: slice, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(columns, hidden)
        targets = self._targets[:, columns].to(logits.device)
        compute = torch.promote_types(logits.dtype, torch.float32)
        each = nn.functional.cross_entropy(
            logits.to(compute).flatten(0, 1), targets.flatten(), reduction="none"
        )
        weights = self._weights[:, columns].to(each)
        return (each * weights.flatten()).sum() / self._total.to(each)


def _require_known(labels: Tensor, vocabulary: int) -> None:
    """Raise ShapeError if a label is not the id of a token."""
    low, high = (int(x) for x in labels.aminmax()) if labels.numel() else (0, 0)
    if low < 0 or high >= vocabulary:
        raise ShapeError(
            f"label {low if low < 0 else high}: the model's vocabulary has 0 to {vocabulary - 1}; "
            f"give ids of its tokens, or {IGNORED} for tokens that are not learned"
        )


class HiddenHead:
    """A caller's own loss of hidden states."""

    def __init__(self, decoder: Layerwise, function: HiddenLoss) -> None:
        self._decoder, self._function = decoder, function

    def pieces(self, columns: slice) -> Iterator[slice]:
        yield columns

    def loss(self, columns: slice, hidden: Tensor) -> Tensor | None:
        return self._function(self._decoder.hidden(columns, hidden), columns)


def head_for(
    decoder: Layerwise,
    labels: Tensor | None,
    weights: Tensor | None,
    num_items: float | Tensor | None,
    function: HiddenLoss | None,
) -> Head:
    """The head for labels, or for a loss of hidden states.

    Raises:
        ShapeError: both labels and a loss are given, or neither; or the labels do not match the
            texts.
    """
    if function is not None and labels is None:
        return HiddenHead(decoder, function)
    if function is not None or labels is None:
        raise ShapeError("give either labels or a head, a function of hidden states")
    return TokenHead(decoder, labels, weights, num_items)


def loss_and_gradients(
    decoder: Layerwise,
    head: Head,
    chunks: Iterable[slice],
    outputs: list[Kept],
    store: Offload,
    scale: float | None,
) -> tuple[Tensor, list[Kept]]:
    """Compute the loss, and `scale` times its gradients.

    The gradients of the head's parameters are added to `.grad`.

    Args:
        outputs: the last layer's output for each chunk; removed from `store`.
        scale: factor on the gradients; None: compute no gradients.

    Returns:
        The loss; and the gradients of the outputs, by chunk (empty if `scale` is None).

    Raises:
        LossError: the loss is not finite.
    """
    total: Tensor | float = 0.0
    gradients = []
    for index, columns in enumerate(chunks):
        hidden = store.take(outputs[index]).detach()
        gradient = None if scale is None else torch.zeros_like(hidden)
        pieces = list(head.pieces(columns))
        for piece in pieces:
            leaf = _within(hidden, columns, piece).detach().requires_grad_(scale is not None)
            with torch.set_grad_enabled(scale is not None):
                share = head.loss(piece, leaf)
            if share is None:
                continue
            total = total + _finite(share.detach(), index, piece)
            if gradient is not None and scale is not None:
                reduces(decoder.model, piece == pieces[-1], recurse=False)
                accumulate([share], [torch.full_like(share, scale)])
                if leaf.grad is not None:
                    _within(gradient, columns, piece).copy_(leaf.grad)
        if gradient is not None:
            gradients.append(store.put(gradient))
    return torch.as_tensor(total), gradients


@contextmanager
def restored_on_failure(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context that adds gradients to the earlier contents of `.grad`, and restores these contents
    if its body raises."""
    once = {id(p): p for p in parameters if p.requires_grad}
    before = [(p, p.grad) for p in once.values()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, gradient in before:
            p.grad = gradient
        raise
    for p, gradient in before:
        if gradient is not None:
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)


def _within(x: Tensor, columns: slice, piece: slice) -> Tensor:
    """The columns `piece` of x, given that x has the columns `columns`."""
    return x[:, piece.start - columns.start : piece.stop - columns.start]


def _finite(loss: Tensor, chunk: int, columns: slice) -> Tensor:
    if not bool(torch.isfinite(loss)):
        raise LossError(
            f"the loss is {float(loss)} in chunk {chunk}, columns {columns.start} to "
            f"{columns.stop}: no gradient and no optimizer state was changed; look at these "
            "tokens, or lower the learning rate"
        )
    return loss
