"""Checks the shapes, dtypes and devices of a chunk's tensors before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.geometry import Geometry


def check_chunk(k: Tensor, v: Tensor, position: Tensor | None, held: Geometry | None) -> None:
    """Check that keys and values fit each other, the positions, and the tokens already held.

    Args:
        k, v: (B, H, n, Dk) and (B, H, n, Dv).
        position: integers (n,) or (B, n), or None.
        held: the geometry of the tokens already held; None: there are none.

    Raises:
        ShapeError: they do not fit.
    """
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or 0 in k.shape:
        raise ShapeError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)}: give (B, H, n, Dk) and "
            "(B, H, n, Dv) with n of at least 1"
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
        fitting = ((k.shape[2],), (k.shape[0], k.shape[2]))
        if position.is_floating_point() or tuple(position.shape) not in fitting:
            raise ShapeError(
                f"positions {tuple(position.shape)} {position.dtype} for {k.shape[2]} tokens in "
                f"{k.shape[0]} rows; give integers (n,) or (B, n)"
            )


def check_until(until: Tensor, k: Tensor) -> None:
    """Check that there is a newest visible position for each token of keys (B, H, n, Dk).

    Raises:
        ShapeError: they do not fit.
    """
    fitting = ((k.shape[2],), (k.shape[0], k.shape[2]))
    whole = not (until.is_floating_point() or until.dtype == torch.bool)
    if not whole or tuple(until.shape) not in fitting:
        raise ShapeError(
            f"until is {tuple(until.shape)} {until.dtype}, but there are {k.shape[2]} tokens in "
            f"{k.shape[0]} rows; give integers (n,) or (B, n)"
        )


def check_queries(q: Tensor, k: Tensor, sinks: Tensor | None = None) -> None:
    """Check that queries (B, Hq, n, Dk) fit the keys (B, H, n, Dk) of the same tokens, and the sink
    logits (Hq,).

    Raises:
        ShapeError: they do not fit.
    """
    fits = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or q.shape[1] % max(1, k.shape[1]):
        raise ShapeError(
            f"queries {tuple(q.shape)} with keys {tuple(k.shape)}: give (B, Hq, n, Dk) and "
            "(B, H, n, Dk), Hq a multiple of H"
        )
    if q.dtype != k.dtype or q.device != k.device:
        raise ShapeError(
            f"queries are {q.dtype} on {q.device}, keys {k.dtype} on {k.device}; use one dtype and "
            "device"
        )
    check_sinks(q, sinks)


class Checks:
    """The checks of one layer. While shapes, dtypes and devices are the same as in the last call,
    which passed, nothing is checked again."""

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

    def queries(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> None:
        """See `check_queries`."""
        logits = None if sinks is None else sinks.shape
        queries = (q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, logits)
        if queries != self._queries:
            check_queries(q, k, sinks)
            self._queries = queries


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Check that there is one sink logit for each query head of q (B, Hq, n, Dk).

    Raises:
        ShapeError: there are more or fewer.
    """
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ShapeError(
            f"sinks {tuple(sinks.shape)}; give one logit per query head, ({q.shape[1]},)"
        )


def wants_gradients(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_alike(what: str, new: Tensor, held: Geometry, width: int) -> None:
    """Check that rows, heads, width, dtype and device are those of the tokens already held."""
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
