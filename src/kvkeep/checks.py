"""Checks a caller's tensors and numbers before anything is changed or computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.geometry import Geometry

_LAST = torch.iinfo(torch.int32).max
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_chunk(k: Tensor, v: Tensor, position: Tensor | None, held: Geometry | None) -> None:
    """Check that keys and values fit each other, the positions, and the tokens already held.

    Args:
        k, v: (B, H, n, Dk) and (B, H, n, Dv).
        position: integers (n,) or (B, n), or None.
        held: geometry of the tokens already held; None: there are none.

    Raises:
        ShapeError: a check fails.
    """
    empty = 0 in k.shape or 0 in v.shape
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or empty:
        raise ShapeError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)}: give (B, H, n, Dk) and "
            "(B, H, n, Dv), each at least 1"
        )
    if k.dtype != v.dtype or k.device != v.device:
        raise ShapeError(
            f"keys are {k.dtype} on {k.device}, values {v.dtype} on {v.device}; use one dtype and "
            "device"
        )
    if not k.is_floating_point():
        raise ShapeError(f"keys and values are {k.dtype}; give a floating-point type")
    if held is not None:
        _check_alike("keys", k, held, held.key_width)
        _check_alike("values", v, held, held.value_width)
    if position is not None:
        check_places("positions", position, k.shape[0], k.shape[2])


def check_places(what: str, x: Tensor, rows: int, n: int, *front: int) -> None:
    """Check that x holds positions, (*front, n) or (B, *front, n).

    Raises:
        ShapeError: its shape is different, or it does not hold integers.
    """
    fitting = ((*front, n), (rows, *front, n))
    if tuple(x.shape) not in fitting or x.dtype not in _INTEGERS:
        raise ShapeError(
            f"{what} {tuple(x.shape)} {x.dtype} for {rows} rows of {n} tokens; give integers "
            f"{fitting[0]} or {fitting[1]}"
        )


def check_range(what: str, x: Tensor) -> None:
    """Check that int64 positions fit the 32 bits that slots and kernels use; narrower types are not
    read.

    Raises:
        ShapeError: a position does not fit.
    """
    if x.dtype != torch.int64 or not x.numel() or x.is_meta or torch.compiler.is_compiling():
        return
    try:
        low, high = (int(end) for end in x.aminmax())
    except RuntimeError:
        return  # a traced tensor, or a tensor of torch.func
    if low < -_LAST or high > _LAST:
        raise ShapeError(
            f"{what} from {low} to {high} do not fit 32 bits; give at most {_LAST}, and -1 for "
            "padding"
        )


def check_softcap(softcap: float | None) -> None:
    """Check that a softcap is a valid divisor.

    Raises:
        ShapeError: the softcap is zero, negative or not finite.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ShapeError(f"softcap {softcap}; give a finite number above 0, or None for no cap")


def check_memory(what: str, x: Tensor, device: torch.device) -> None:
    """Check that a kernel can read all of x from its address.

    Raises:
        ShapeError: x is on another device, not strided, or exceeds its storage.
    """
    if x.device != device:
        raise ShapeError(f"{what} on {x.device}, the queries on {device}; move them to one device")
    if x.layout != torch.strided:
        raise ShapeError(f"{what} in layout {x.layout}; give a strided tensor: call to_dense()")
    count = x.numel()
    if type(count) is not int or not count or torch.compiler.is_compiling():
        return
    try:
        held = x.untyped_storage().nbytes()
    except RuntimeError:
        return  # a tensor of torch.func, without memory of its own
    last: int | torch.SymInt = count - 1  # if x is contiguous, which is the quicker question
    if not x.is_contiguous():
        last = sum((a - 1) * b for a, b in zip(x.shape, x.stride(), strict=True))
    last += x.storage_offset()
    if (last + 1) * x.element_size() > held:
        raise ShapeError(
            f"{what} {tuple(x.shape)} {x.dtype} need {(last + 1) * x.element_size()} bytes, but "
            f"their storage holds {held}: it was resized; give a tensor that owns its memory"
        )


def resolved(x: Tensor) -> Tensor:
    """x with its values in memory, for kernels; x itself if they already are. torch negates lazily,
    and zero tensors of forward-mode gradients have no memory."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def check_queries(q: Tensor, k: Tensor, sinks: Tensor | None = None) -> None:
    """Check that queries (B, Hq, n, Dk) fit the keys (B, H, n, Dk) of the same tokens, and the sink
    logits (Hq,).

    Raises:
        ShapeError: a check fails.
    """
    fits = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or 0 in q.shape or q.shape[1] % max(1, k.shape[1]):
        raise ShapeError(
            f"queries {tuple(q.shape)} with keys {tuple(k.shape)}: give (B, Hq, n, Dk) and "
            "(B, H, n, Dk), Hq a multiple of H, each at least 1"
        )
    if q.dtype != k.dtype or q.device != k.device:
        raise ShapeError(
            f"queries are {q.dtype} on {q.device}, keys {k.dtype} on {k.device}; use one dtype and "
            "device"
        )
    check_sinks(q, sinks)


class Checks:
    """The checks of one layer. If shapes, dtypes and devices are the same as in the last successful
    check, only the values of int64 positions are checked."""

    def __init__(self) -> None:
        self._chunk: tuple[object, ...] = ()
        self._held: Geometry | None = None
        self._queries: tuple[object, ...] = ()

    def chunk(self, k: Tensor, v: Tensor, position: Tensor | None, held: Geometry | None) -> None:
        """See `check_chunk`."""
        place = None if position is None else (position.shape, position.dtype)
        chunk = (k.shape, k.dtype, k.device, v.shape, v.dtype, v.device, place)
        if held is not self._held or chunk != self._chunk:
            check_chunk(k, v, position, held)
            self._chunk, self._held = chunk, held
        if position is not None and position.dtype is torch.int64:
            check_range("positions", position)

    def queries(
        self,
        q: Tensor,
        k: Tensor,
        sinks: Tensor | None,
        softcap: float | None = None,
        slopes: Sequence[float] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """See `check_queries`, `check_softcap` and `check_bias`. `slopes`: the layer's slopes, if
        any."""
        logits = None if sinks is None else sinks.shape
        check_bias(q, bias)
        queries = (q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, logits, softcap)
        if queries != self._queries:
            check_queries(q, k, sinks)
            check_softcap(softcap)
            if slopes is not None and len(slopes) != q.shape[1]:
                raise ShapeError(
                    f"{q.shape[1]} query heads in a layer with {len(slopes)} slopes; give one "
                    "slope per query head"
                )
            self._queries = queries


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Check that there is one sink logit for each query head of q (B, Hq, n, Dk).

    Raises:
        ShapeError: the number is different, or the logits are not real numbers.
    """
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.is_complex()):
        raise ShapeError(
            f"sinks {tuple(sinks.shape)} {sinks.dtype}; give one logit per query head, "
            f"({q.shape[1]},)"
        )


def check_slopes(q: Tensor, slopes: Tensor | None) -> None:
    """Check that there is one slope for each query head of q (B, Hq, n, Dk).

    Raises:
        ShapeError: the number is different, or the slopes are not real numbers or need gradients.
    """
    if slopes is None:
        return
    if slopes.shape != (q.shape[1],) or not slopes.is_floating_point():
        raise ShapeError(
            f"slopes {tuple(slopes.shape)} {slopes.dtype}; give one number per query head, "
            f"({q.shape[1]},)"
        )
    if slopes.requires_grad:
        raise ShapeError("slopes get no gradients; give slopes.detach()")


def check_bias(q: Tensor, bias: Tensor | None) -> None:
    """Check that there is a bias by distance for each query of q (B, Hq, n, Dk).

    Raises:
        ShapeError: the shape is another one, or the biases are not real numbers.
    """
    if bias is None:
        return
    fits = bias.dim() == 4 and bias.shape[:3] == q.shape[:3] and bias.shape[3] > 0
    if not fits or not bias.is_floating_point():
        raise ShapeError(
            f"bias {tuple(bias.shape)} {bias.dtype} of queries {tuple(q.shape)}; give floats "
            f"{tuple(q.shape[:3])} x distances, at least one"
        )


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_alike(what: str, new: Tensor, held: Geometry, width: int) -> None:
    """Check that rows, heads, width, dtype and device equal those of the tokens already held."""
    if (new.shape[0], new.shape[1], new.shape[3]) != (held.rows, held.heads, width):
        raise ShapeError(
            f"{what} {tuple(new.shape)} for a cache of {held.rows} rows, {held.heads} heads, width "
            f"{width}; reorder(), repeat() or select() rows first, or reset()"
        )
    if new.dtype != held.dtype or new.device != held.device:
        raise ShapeError(
            f"{what} are {new.dtype} on {new.device}, the cache holds {held.dtype} on "
            f"{held.device}; convert them, or reset() the cache"
        )
