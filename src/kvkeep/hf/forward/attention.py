"""The attention function of attached models. It runs a step of the layer that tagged the keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.attention import Attend
from kvkeep.errors import UnsupportedError
from kvkeep.hf.config import own_implementation
from kvkeep.hf.forward.masks import MaskRequest, masked
from kvkeep.hf.forward.unserved import require_hooked
from kvkeep.hf.forward.weights import explicit_step
from kvkeep.hf.handover import BIAS, Handed, ModelLayer, ReadLayer
from kvkeep.layer.step import StepInputs

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def attention_over(original: str) -> AttentionFunction:
    """An attention function for models whose attention was `original` when they were attached.

    For keys from a kvkeep cache, it runs a step of their layer. For all other keys, such as in a
    training forward or with another cache, it calls the model's own implementation: `original`, or
    the implementation that was set since.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,  # libraries that wrap attention functions pass it by position
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        handed: Handed | None = getattr(key, "kvkeep", None)
        with_values: Handed | None = getattr(value, "kvkeep", None)
        indexed = None if handed is None else handed.indexed
        if indexed is not None and indexed.mask is not None:
            attention_mask = indexed.mask
        if handed is None and with_values is None and not _is_positions(attention_mask):
            if not torch.compiler.is_compiling():
                require_hooked(module)
            if kwargs.get("indices") is not None and attention_mask is not None:
                attention_mask = masked(attention_mask, kwargs.pop("indices"), key.shape[2])
            if callable(kwargs.get("block_indices")):
                build = kwargs.pop("block_indices")
                attention_mask = build(attention_mask, key.shape[2], query.dtype, query.device)
            return _original(_own(module, original), module)(
                *(module, query, key, value, attention_mask),
                scaling=scaling,
                dropout=dropout,
                **kwargs,
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if handed is not None and handed.absorbed is not None and handed is with_values:
            absorbed, handed.absorbed = handed.absorbed, None
            q = absorbed.queries(query)
            out, weights = attention(
                module, q, key, value, attention_mask, dropout, scale, **kwargs
            )
            return absorbed.results(out), weights
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        inputs = StepInputs(query, key, value, None, scale, softcap, sinks, bias=kwargs.get(BIAS))
        columns = kwargs.get("indices")
        inputs = inputs if columns is None else inputs._replace(chosen=columns[:, None])
        asked: MaskRequest | None = getattr(attention_mask, "kvkeep", None)
        if (  # a decode step, where nothing else can be wrong
            handed is not None
            and handed is with_values
            and asked is not None
            and asked.position is not None
            and query.shape[2] == 1
            and handed.plain
            and not (handed.taken or dropout or handed.weights or sinks is not None)
            and (handed.versions is None or handed.versions == (key._version, value._version))
            and asked.window == handed.layer.window
            and kwargs.get("position_bias") is None
            and not torch.is_autocast_enabled(query.device.type)
        ):
            handed.taken = True
            inputs = inputs._replace(position=asked.position, until=asked.until)
            inputs = inputs if indexed is None else indexed.step(inputs)
            return handed.layer.run(inputs).transpose(1, 2).contiguous(), None
        tagged = _require_tagged(module, handed, with_values, inputs, attention_mask)
        _require_supported(module, inputs, kwargs, _own(module, original))
        explicit = explicit_step(tagged, dropout)
        assert attention_mask is not None  # `_unfit`
        out = _stepped(tagged, inputs, explicit, attention_mask)
        return out.transpose(1, 2).contiguous(), None if explicit is None else explicit.weights

    return attention


def _require_supported(
    module: nn.Module, inputs: StepInputs, options: dict[str, Any], original: str
) -> None:
    """Raise UnsupportedError if a module asks for attention that no step computes."""
    asks = ""
    if inputs.q.shape[2] > 1 and not _is_causal(original, module, options):
        asks = "lets tokens attend to later tokens"
    elif options.get("position_bias") is not None:
        asks = "adds a position bias of its own to scores, which a kvkeep cache does not"
    if asks:
        raise _refused(module, asks)


def _parts(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """The positions in a mask made by kvkeep, int32 (1|B, n); and `until`, the newest position that
    each token sees, or None if no token sees later tokens."""
    return (mask.flatten(1), None) if mask.shape[2] == 1 else (mask[:, 0, 0], mask[:, 0, 1])


def _stepped(handed: Handed, inputs: StepInputs, explicit: Attend | None, mask: Tensor) -> Tensor:
    """Run the step of the layer that tagged the keys, or a reading if the step was made already."""
    again, handed.taken = handed.taken, True
    inputs = inputs if handed.indexed is None else handed.indexed.step(inputs)
    if again and torch.compiler.is_compiling():
        handed.reads += 1
        assert handed.traced is not None  # `_misused`
        return handed.traced.read(inputs._replace(position=_parts(mask)[0]))
    if again:
        assert isinstance(handed.layer, ReadLayer)  # `_misused`
        return _in_own_dtype(handed.layer.read, inputs, explicit)
    traced = handed.traced  # None in training, which is not compiled
    if traced is not None and (torch.compiler.is_compiling() or traced.on_device):
        position, until = _parts(mask)
        return traced.run(inputs._replace(position=position, until=until))
    asked: MaskRequest | None = getattr(mask, "kvkeep", None)
    known, until = (None, None) if asked is None else asked[1:]
    if known is None:
        position, until = _parts(mask)
        known = _confirmed(position, handed.layer, len(inputs.k))
    return _in_own_dtype(handed.layer.run, inputs._replace(position=known, until=until), explicit)


def _in_own_dtype(
    run: Callable[..., Tensor], inputs: StepInputs, explicit: Attend | None
) -> Tensor:
    """Run a layer's step, or a reading. Autocast does not cast rotated keys, so under autocast they
    are cast to the dtype that it uses for torch's own attention."""
    attend = () if explicit is None else (explicit,)
    device = inputs.q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) for x in inputs[:3])
        with torch.autocast(device, enabled=False):
            return run(inputs._replace(q=q, k=k, v=v), *attend)
    return run(inputs, *attend)


def _confirmed(position: Tensor, layer: ModelLayer, rows: int) -> Tensor:
    """Check positions (1|B, n) that arrived without their `MaskRequest`.

    Raises:
        UnsupportedError: they are not the layer's next positions, so kvkeep did not make them.
    """
    real = position >= 0
    expected = layer.next_positions(position.shape[1], position.device, real)
    if not expected.expand_as(position).equal(position):
        raise UnsupportedError(
            "an int32 mask of four axes was not made by kvkeep; give a mask (B, columns), or use "
            "the cache with kvkeep.detach(model)"
        )
    return position if len(position) == rows else position[0]


def _require_tagged(
    module: nn.Module,
    handed: Handed | None,
    with_values: Handed | None,
    inputs: StepInputs,
    mask: Tensor | None,
) -> Handed:
    """The tag of the keys. Raise UnsupportedError unless keys, values and mask form one step of a
    layer, or a reading of one, as they are."""
    reason = _unfit(handed, with_values, mask)
    if not reason and handed is not None:
        reason = _misused(handed, inputs.k, inputs.v)
    if reason or handed is None:
        raise _refused(module, reason)
    return handed


def _refused(module: nn.Module, reason: str) -> UnsupportedError:
    """The error for the attention of a module, by the type of its model, as a user knows it."""
    name = getattr(getattr(module, "config", None), "model_type", None)
    named = f"{name}'s attention" if name else type(module).__name__
    return UnsupportedError(f"{named} {reason}; use the cache with kvkeep.detach(model)")


def _unfit(handed: Handed | None, with_values: Handed | None, mask: Tensor | None) -> str:
    """Why keys, values and mask do not form one step of a layer; empty if they do.

    A mask that was moved to a layer's device is a copy, which lacks its `MaskRequest`.
    """
    if handed is None:
        return "changes its keys after the cache"
    if with_values is not handed:
        return "changes its values after the cache"
    if not _is_positions(mask):
        return "uses a mask of its own"
    asked: MaskRequest | None = getattr(mask, "kvkeep", None)
    if asked is not None and asked.window != handed.layer.window:
        return f"masks a window of {asked.window} tokens, but its config says {handed.layer.window}"
    return ""


def _is_positions(mask: Tensor | None) -> bool:
    """Whether a mask has the form of the results of kvkeep's mask function."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32:
        return False
    return mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] in (1, 2)  # see `_parts`


def _misused(handed: Handed, key: Tensor, value: Tensor) -> str:
    """Why keys and values are not the cache's result, unchanged and used no more often than layers
    share them; empty if they are."""
    if handed.taken and not _is_read(handed):
        return "attends more than once to the keys that it gave to the cache"
    if handed.versions is not None and handed.versions != (key._version, value._version):
        return "changes its keys or values in place after the cache"
    return ""


def _is_read(handed: Handed) -> bool:
    """Whether another layer may still read the layer's slots after its step."""
    if torch.compiler.is_compiling():
        return handed.traced is not None and handed.reads < handed.traced.readers
    return isinstance(handed.layer, ReadLayer) and handed.layer.cursor.unread > 0


def _is_causal(original: str, module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether tokens attend to earlier tokens only. If transformers leaves out a causal mask (never
    for "eager"), the flag `is_causal` tells its attention functions to be causal."""
    flag = kwargs.get("is_causal")
    return original == "eager" or bool(getattr(module, "is_causal", True) if flag is None else flag)


def _own(module: nn.Module, original: str) -> str:
    """The implementation of a module's attention without a kvkeep cache."""
    return own_implementation(getattr(module, "config", None), original)


def _original(name: str, module: nn.Module) -> AttentionFunction:
    """The registered attention function, or the eager one of the module's source file."""
    eager: AttentionFunction = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )  # type: ignore[assignment]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function
