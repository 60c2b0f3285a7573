"""Attention over a view: one operation with several backends, chosen from an explicit table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep import native_library
from kvkeep.attention import explicit as explicit
from kvkeep.attention import native, reference, sdpa, triton, triton_packed
from kvkeep.attention.centre import Centre as Centre
from kvkeep.attention.fitting import check_call, in_memory
from kvkeep.attention.options import Options
from kvkeep.attention.plain import attend_plain
from kvkeep.attention.rotation import Rotation as Rotation
from kvkeep.attention.view import Held as Held
from kvkeep.attention.view import Segment, View, joined_parts, unbounded
from kvkeep.errors import UnsupportedError
from kvkeep.planes import Reach, unsliced

__all__ = [
    "Backend",
    "Options",
    "Segment",
    "View",
    "attend",
    "backends",
    "register_backend",
]

Attend = Callable[[Tensor, View, Options], tuple[Tensor, Tensor | None]]
"""An implementation of attention: (queries, view, options) -> (out, mass)."""


@dataclass(frozen=True)
class Backend:
    """One implementation of `attend`.

    Args:
        name: name for the `backend` argument of `attend`.
        run: the implementation.
        refuses: returns the reason why the backend does not support a call, or None.
        limits: one line about unsupported calls.
        about: a short description.
        device: device type on which `attend` tries it; None: any. Calls that name it may use other
            devices.
        differentiable: whether it supports gradients.
        missing: returns the reason why the backend cannot run on this machine; empty if it can.
        yields: whether a later backend of the table is faster for a call.
    """

    name: str
    run: Attend
    refuses: Callable[[Tensor, View, Options], str | None]
    limits: str
    about: str
    device: str | None = None
    differentiable: bool = True
    missing: Callable[[], str] = str
    yields: Callable[[Tensor, View, Options], bool] = lambda q, view, options: False

    @property
    def available(self) -> bool:
        """Whether it can run on this machine."""
        return not self.missing()

    @property
    def reason(self) -> str:
        """The reason why it cannot run on this machine; its description if it can."""
        return self.missing() or self.about


_TABLE: tuple[Backend, ...] = (
    Backend(
        "native",
        native.run,
        native.refuses,
        limits="CPU; float32, bfloat16, float16; no gradients",
        about=native_library.reason,
        device="cpu",
        differentiable=False,
        missing=lambda: "" if native_library.available else native_library.reason,
        yields=native.yields,
    ),
    Backend(
        "triton",
        triton.run,
        triton.refuses,
        limits="CUDA; float32, bfloat16, float16; heads up to 256 wide; no gradients",
        about="kernels compiled on first use",
        device="cuda",
        differentiable=False,
        missing=triton.reason,
        yields=triton.yields,
    ),
    Backend(
        "sdpa",
        sdpa.run,
        sdpa.refuses,
        limits="no softcap, no mass, no bias; several segments, and slopes, on the CPU only",
        about="torch's fused kernels",
    ),
    Backend(
        "reference",
        reference.run,
        reference.refuses,
        limits="none; slow",
        about="plain torch operations",
    ),
)


def backends() -> tuple[Backend, ...]:
    """All backends, in the order in which `attend` tries them."""
    return _TABLE


def register_backend(backend: Backend, *, before: str | None = None) -> None:
    """Add a backend, or replace the backend of the same name.

    Args:
        backend: the backend.
        before: name of the backend that is tried after it; None: it is tried last.

    Raises:
        UnsupportedError: there is no backend `before`.
    """
    global _TABLE
    others = [one for one in _TABLE if one.name != backend.name]
    names = [one.name for one in others]
    if before is not None and before not in names:
        raise UnsupportedError(f"no attention backend {before!r}; there are {', '.join(names)}")
    place = len(others) if before is None else names.index(before)
    _TABLE = (*others[:place], backend, *others[place:])


def attend(
    q: Tensor,
    view: View,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    centre: Centre | None = None,
    need_mass: bool = False,
    observed: int | None = None,
    peak: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Grouped-query attention of a chunk over the slots of a view, without copying them.

    Args:
        q: queries (B, Hq, n, Dk); Hq a multiple of the view's H. Any strides.
        view: the slots, with the positions that determine which slots each query sees.
        scale: factor on q.k, usually Dk ** -0.5.
        window: a query sees no slot `window` or more positions before its own.
        causal: a query sees no slot after its own position. False: it sees later slots too, as in
            an encoder, and the view need not hold the queries' own slots, as in cross attention. A
            query at position -1 sees nothing in either case.
        softcap: scores x become softcap * tanh(x / softcap); above 0, or None.
        sinks: logits (Hq,) added to the softmax's denominator; they have no value vector.
        slopes: bias (Hq,) of each query head: a slot at position p adds slope * (p - t) to its
            score for a query at position t (ALiBi, linear biases). They get no gradients.
        bias: (B, Hq, n, E): a slot at position p adds bias[..., min(t - p, E - 1)] to its score for
            a query at position t, and bias[..., 0] if it is later than the query.
        centre: the scales and mean keys that the slots' keys lack; None: keys are complete.
        need_mass: also return the mass.
        observed: the mass counts only the newest `observed` real queries (position >= 0) of each
            row in the chunk; None: all.
        peak: return as mass the largest probability that each slot received from any counted query
            and any query head of the group, instead of the sum.
        backend: a name from `backends()`; None: the first backend that supports the call.

    Returns:
        out (B, Hq, n, Dv) in q's dtype, zero for padding; and the mass, fp32 (B, H, S): the
        probability each slot received, summed over the chunk's queries and averaged over the
        group, or its `peak`; or None.

    Raises:
        ShapeError: q does not fit the view, a segment is malformed, or a number is out of range.
        UnsupportedError: the named backend does not support this call.
    """
    if not causal:
        view = view._replace(bounds=unbounded(view.position))
    if window is not None:
        view = view._replace(reaches=(*view.reaches, Reach(window)))
    options = Options(scale, softcap, sinks, need_mass, observed, peak, slopes, centre, bias)
    out = _short(q, view, options, backend)
    if out is not None:
        return out, None
    check_call(q, view, options)
    return _dispatch(*in_memory(q, view, options), backend)


def dispatch(
    q: Tensor,
    view: View,
    options: Options,
    backend: str | None = None,
    *,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`attend` without `check_call`, for views that a layer made of its own slots and for queries
    that were checked with their chunk. `differentiable`: use only backends with gradients, even if
    no input requires gradients now."""
    out = None if differentiable else _short(q, view, options, backend)
    if out is not None:
        return out, None
    return _dispatch(q, view, options, backend, differentiable)


def _short(q: Tensor, view: View, options: Options, backend: str | None) -> Tensor | None:
    """The result if the native backend is the first to try and `attend_plain` computes the call."""
    if backend not in (None, "native") or _TABLE[0].run is not native.run:
        return None
    return attend_plain(q, view, options, measured=backend is None)


def _dispatch(
    q: Tensor,
    view: View,
    options: Options,
    backend: str | None,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`dispatch` to the first backend that supports the call."""
    if view.in_parts:
        return _each_part(q, view, options, backend, differentiable)
    for candidate in _TABLE:
        if differentiable > candidate.differentiable or backend not in (None, candidate.name):
            continue
        if backend is None and (
            candidate.device not in (None, q.device.type) or candidate.yields(q, view, options)
        ):
            continue
        reason = candidate.refuses(q, view, options) or candidate.missing()
        if not reason:
            return candidate.run(q, view, options)
        if backend is not None:
            raise UnsupportedError(f"backend {backend!r}: {reason}; use backend=None")
    known = ", ".join(b.name for b in _TABLE)
    raise UnsupportedError(f"no attention backend {backend!r}; there are {known}")


def several_at_once(q: Tensor) -> bool:
    """Whether one call of `dispatch_several` is faster than one of `dispatch` per query like q."""
    return q.is_cuda and not triton.reason()


def dispatch_several(
    calls: Sequence[tuple[Tensor, View, Options]],
) -> list[tuple[Tensor, Tensor | None]]:
    """`dispatch` for several sequences, q (1, Hq, 1, Dk) each, whose options differ only in the
    mass. On CUDA all calls without the mass are one launch."""
    outputs: dict[int, tuple[Tensor, Tensor | None]] = {}
    some = [index for index, (_, _, options) in enumerate(calls) if not options.need_mass]
    if len(some) > 1 and several_at_once(calls[0][0]):
        q = torch.cat([calls[index][0] for index in some], dim=2)
        views, options = [calls[index][1] for index in some], calls[some[0]][2]
        if triton_packed.refuses_packed(q, views, options) is None:
            out = triton_packed.run_packed(q, views, options)
            outputs = {index: (out[:, :, i : i + 1], None) for i, index in enumerate(some)}
    return [outputs[i] if i in outputs else dispatch(*call) for i, call in enumerate(calls)]


def _rows(rows: Tensor, q: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Some rows of queries and of their biases."""
    return q.index_select(0, rows), None if bias is None else bias.index_select(0, rows)


def _each_part(
    q: Tensor, view: View, options: Options, backend: str | None, differentiable: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention with one call for each part of the view."""
    parts = view.parts
    kv_heads = unsliced(parts[0].planes)["k"].shape[1]
    if parts[0].head is not None:
        kv_heads = 1 + max(part.head or 0 for part in parts)
    group, longest = q.shape[1] // kv_heads, max(part.slots for part in parts)
    outs: list[Tensor] = []
    masses: list[Tensor] = []
    for part in parts:
        rows, head = part.rows, part.head
        own = slice(None) if head is None else slice(head * group, (head + 1) * group)
        sinks = None if options.sinks is None else options.sinks[own]
        slopes = None if options.slopes is None else options.slopes[own]
        queries, bias = (q, options.bias) if rows is None else _rows(rows, q, options.bias)
        bias = None if bias is None else bias[:, own]
        centre = part.own(options.centre)
        asked = options._replace(sinks=sinks, slopes=slopes, bias=bias, centre=centre)
        call = queries[:, own], view.of_part(part), asked, backend
        out, mass = dispatch(*call, differentiable=differentiable)
        outs.append(out)
        if mass is not None:
            first, others = mass[:, :, : part.slots], mass[:, :, part.slots :]
            padded = torch.nn.functional.pad(first, (0, longest - part.slots))
            masses.append(torch.cat([padded, others], dim=2))
    out = joined_parts(outs, parts)
    return out, joined_parts(masses, parts) if masses else None
