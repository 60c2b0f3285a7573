"""Copies of decoders without weights, whose forwards are cheap.

Each weight is one number, expanded to the weight's shape. Products treat it as a matrix of rank
one, so neither time nor memory depends on the width of the model. Everything else is computed as in
the model: masks, routing of experts, rotary embeddings, and calls of the cache and of the attention
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from kvkeep.hf.config import decoder_config, unrouted

EAGER = "eager"
_SMALL = 1 << 16
"""The most elements of a buffer that is allocated in full, so that a forward may write to it."""


@contextmanager
def cheap_forwards() -> Iterator[None]:
    """A context without full matrix products, gradients or autocast, which leaves the state of the
    random number generator unchanged."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        _Products(),  # type: ignore[no-untyped-call]
    ):
        yield


def without_weights(decoder: PreTrainedModel, *, window: int | None = None) -> PreTrainedModel:
    """A decoder of the same class and config, whose weights use no memory. Its buffers are copies
    of the decoder's.

    Args:
        window: the size of its sliding windows and chunks, if it has any; None: as in its config.
    """
    config = deepcopy(unrouted(decoder.config))
    text = decoder_config(config)
    text._attn_implementation = EAGER
    for name in ("sliding_window", "attention_chunk_size"):
        if window is not None and getattr(text, name, None) is not None:
            setattr(text, name, window)
    with torch.device("meta"):
        copied: PreTrainedModel = type(decoder)(config).eval()
    originals = dict(decoder.named_modules())
    for path, module in copied.named_modules():
        original = originals.get(path)
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_expanded(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _as_in(original, name, buffer)
        for name, other in vars(module).items():
            if isinstance(other, Tensor) and other.is_meta:
                setattr(module, name, _as_in(original, name, other))
    return copied


def _expanded(like: Tensor) -> Tensor:
    number = 0.5 if like.is_floating_point() else 0
    return torch.full((), number, dtype=like.dtype, device="cpu").expand(like.shape)


def _as_in(original: nn.Module | None, name: str, like: Tensor) -> Tensor:
    """A copy of a module's tensor, to which a forward may write; if the module has no such tensor
    with data, a tensor like `like`."""
    found = getattr(original, name, None)
    if type(found) is Tensor and found.shape == like.shape and not found.is_meta:
        return found.detach().to("cpu", copy=True)
    filled = _expanded(like)
    return filled.clone() if like.numel() <= _SMALL else filled


def _is_expanded(x: Tensor) -> bool:
    return x.numel() > 1 and not any(x.stride())


_PRODUCTS: dict[str, int] = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_grouped_mm": 0,
    "transformers::grouped_mm_fallback": 0,
}
"""Operators of matrix products, and the index of the left matrix among their arguments."""


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Treats weights without memory as matrices of rank one, and as embeddings with a different
    vector for each token."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::embedding" and _is_expanded(args[0]) and not args[0].is_meta:
            return _embedded(args[0], args[1])
        left = _PRODUCTS.get(name)
        if left is None or args[left].is_meta or not _is_expanded(args[left + 1]):
            return func(*args, **(kwargs or {}))
        return _product(args[left], args[left + 1], args[0] if left else None)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) times a matrix (..., K, M) of rank one."""
    k, m = (torch.arange(size, dtype=x.dtype, device=x.device) for size in weight.shape[-2:])
    reads = (1.7 * k).cos() * (2 / len(k)) ** 0.5
    product: Tensor = (x @ reads)[..., None] * (0.9 * m + 0.3).sin()
    return product if bias is None else product + bias


def _embedded(weight: Tensor, ids: Tensor) -> Tensor:
    width = torch.arange(1, weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)
    return (0.37 * (ids[..., None] + 1) * width).sin()
