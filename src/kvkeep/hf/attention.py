"""The attention function of attached models. It runs a step of the layer that tagged the keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.attention import Attend
from kvkeep.errors import StateError, UnsupportedError
from kvkeep.hf.handover import AttendedLayer, Handed
from kvkeep.hf.masks import MaskRequest
from kvkeep.hf.weights import explicit_step
from kvkeep.layer.step import StepInputs

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def attention_over(original: str) -> AttentionFunction:
    """An attention function for models whose attention was `original` before they were attached.

    For keys from a kvkeep cache it runs a step of their layer. All other keys, such as those of a
    training forward or of another cache, go to the original function.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        handed: Handed | None = getattr(key, "kvkeep", None)
        with_values: Handed | None = getattr(value, "kvkeep", None)
        asked: MaskRequest | None = getattr(attention_mask, "kvkeep", None)
        if handed is None and with_values is None and asked is None:
            if softcap is not None:
                kwargs["softcap"] = softcap
            if s_aux is not None:
                kwargs["s_aux"] = s_aux
            return _original(original, module)(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scaling,
                dropout=dropout,
                **kwargs,
            )
        reason = _unfit(handed, with_values, asked, attention_mask)
        if not reason and handed is not None:
            reason = _misused(handed, key, value)
        if not reason and query.shape[2] > 1 and not _is_causal(original, module, kwargs):
            reason = "lets tokens attend to later ones"
        if handed is None or reason:
            raise UnsupportedError(
                f"{type(module).__name__} {reason}; use the cache with kvkeep.detach(model)"
            )
        handed.taken = True
        if kwargs.get("position_bias") is not None:
            raise StateError(
                "attention through a kvkeep cache has no position bias; use the cache with "
                "kvkeep.detach(model)"
            )
        explicit = explicit_step(handed, dropout)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert attention_mask is not None
        traced = handed.traced  # None in training, which is not compiled
        if traced is not None and (torch.compiler.is_compiling() or traced.on_device):
            position = attention_mask.flatten(1)
            out = traced.run(StepInputs(query, key, value, position, scale, softcap, s_aux))
        else:
            known = None if asked is None else asked.position
            if known is None:
                known = _confirmed(attention_mask.flatten(1), handed.layer, len(key))
            inputs = StepInputs(query, key, value, known, scale, softcap, s_aux)
            out = _step(handed.layer, inputs, *([] if explicit is None else [explicit]))
        weights = None if explicit is None else explicit.weights
        return out.transpose(1, 2).contiguous(), weights

    return attention


def _step(layer: AttendedLayer, inputs: StepInputs, *attend: Attend) -> Tensor:
    """Run a layer's step. Under autocast, which does not cast rotated keys, it runs in the dtype
    that autocast uses for torch's own attention."""
    device = inputs.q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) for x in inputs[:3])
        with torch.autocast(device, enabled=False):
            return layer.run(inputs._replace(q=q, k=k, v=v), *attend)
    return layer.run(inputs, *attend)


def _confirmed(position: Tensor, layer: AttendedLayer, rows: int) -> Tensor:
    """Verify positions (1|B, n) that arrived without the mask request they were made for.

    Raises:
        UnsupportedError: they are not the layer's next positions, so not made by kvkeep.
    """
    real = position >= 0
    expected = layer.next_positions(position.shape[1], position.device, real)
    if not expected.expand_as(position).equal(position):
        raise UnsupportedError(
            "an int32 mask of four axes is not one of kvkeep's; give a mask (B, columns), or use "
            "the cache with kvkeep.detach(model)"
        )
    return position if len(position) == rows else position[0]


def _unfit(
    handed: Handed | None,
    with_values: Handed | None,
    asked: MaskRequest | None,
    mask: Tensor | None,
) -> str:
    """Why keys, values and mask do not form one step of a layer; empty if they do.

    A mask that was moved to a layer's device is a copy, which lacks the request it was made for.
    """
    if handed is None:
        return "changes its keys after the cache"
    if with_values is not handed:
        return "changes its values after the cache"
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.shape[1:3] != (1, 1):
        return "uses a mask of its own"
    if asked is not None and asked.window != handed.layer.window:
        return (
            f"masks a window of {asked.window} tokens where its config says {handed.layer.window}"
        )
    return ""


def _misused(handed: Handed, key: Tensor, value: Tensor) -> str:
    """Why these are not the tensors as the cache returned them, used for the first time; empty if
    they are."""
    if handed.taken:
        return "attends more than once to what it gave to the cache"
    if handed.versions is not None and handed.versions != (key._version, value._version):
        return "changes its keys or values in place after the cache"
    return ""


def _is_causal(original: str, module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a token attends to those before it only. Where transformers leaves out a causal mask,
    which it does not for "eager", its attention functions are causal by this flag."""
    flag = kwargs.get("is_causal")
    return original == "eager" or bool(getattr(module, "is_causal", True) if flag is None else flag)


def _original(name: str, module: nn.Module) -> AttentionFunction:
    """The registered attention function, or the eager one of the module's source file."""
    eager: AttentionFunction = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )  # type: ignore[assignment]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function
