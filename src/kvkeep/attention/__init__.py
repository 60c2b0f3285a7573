"""Attention over a view: one operation, several backends, chosen by an explicit table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvkeep import library
from kvkeep.attention import explicit, native, reference, sdpa, triton
from kvkeep.attention.options import Options
from kvkeep.attention.rotation import Rotation
from kvkeep.attention.view import Held, Segment, View
from kvkeep.chunk import check_sinks
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.planes import Reach, unsliced

__all__ = [
    "Attend",
    "Backend",
    "Held",
    "Options",
    "Rotation",
    "Segment",
    "View",
    "attend",
    "backends",
    "dispatch",
    "each_head",
    "explicit",
]

Attend = Callable[[Tensor, View, Options], tuple[Tensor, Tensor | None]]
"""One way to compute attention: queries that fit a view -> out, mass."""


@dataclass(frozen=True)
class Backend:
    """One implementation of `attend`.

    `missing` is about this machine: why the backend cannot run here, or nothing; `refuses` is about
    one call: why the backend cannot do it, or None; `limits` sums that up. `device` is where it is
    tried without being named; None: anywhere. `yields`: whether another does a call better.
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
        """Why it cannot, or what it is."""
        return self.missing() or self.about


_TABLE = (
    Backend(
        "native",
        native.run,
        native.refuses,
        limits="CPU; float32, bfloat16, float16; no gradients",
        about=library.reason,
        device="cpu",
        differentiable=False,
        missing=lambda: "" if library.available else library.reason,
    ),
    Backend(
        "triton",
        triton.run,
        triton.refuses,
        limits="CUDA; float32, bfloat16, float16; heads up to 256 wide; no gradients",
        about="kernels compiled when they are first used",
        device="cuda",
        differentiable=False,
        missing=triton.reason,
        yields=triton.yields,
    ),
    Backend(
        "sdpa",
        sdpa.run,
        sdpa.refuses,
        limits="no softcap, no mass; several segments on the CPU only",
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
    """Every backend, in the order in which `attend` tries them."""
    return _TABLE


def attend(
    q: Tensor,
    view: View,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    need_mass: bool = False,
    observed: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Grouped-query attention of a chunk over the slots where they lie.

    Args:
        q: queries (B, Hq, n, Dk); Hq a multiple of the view's H. Any strides.
        view: the slots, with the positions that say who sees what.
        scale: factor on q.k, usually Dk ** -0.5.
        window: a query also sees no slot `window` or more positions before it.
        softcap: scores x become softcap * tanh(x / softcap).
        sinks: logits (Hq,) that take part in the softmax and receive no value.
        need_mass: also return the mass.
        observed: the mass counts only each row's newest `observed` real queries (position >= 0) of
            the chunk; None: all.
        backend: a name from `backends()`; None takes the first that can.

    Returns:
        out (B, Hq, n, Dv) in q's dtype, zero for padding; and the mass, fp32 (B, H, S): the
        probability each slot received, summed over the chunk's queries and averaged over the
        group, or None.

    Raises:
        ShapeError: q does not fit the view.
        UnsupportedError: the named backend cannot do this call.
    """
    _check(q, view, sinks)
    if window is not None:
        view = view._replace(reaches=(*view.reaches, Reach(window)))
    return dispatch(q, view, Options(scale, softcap, sinks, need_mass, observed), backend)


def dispatch(
    q: Tensor,
    view: View,
    options: Options,
    backend: str | None = None,
    *,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`attend`, for queries that are known to fit the view; `differentiable`: by a backend that
    gradients could go through, whether they are wanted now or not."""
    if view.by_head:
        alone = partial(dispatch, backend=backend, differentiable=differentiable)
        return each_head(q, view, options, alone)
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


def each_head(
    q: Tensor, view: View, options: Options, attend: Attend
) -> tuple[Tensor, Tensor | None]:
    """One call for each kv head, whose slots are its own."""
    group, slots = q.shape[1] // len(view.segments), view.slots
    outs, masses = [], []
    for index, segment in enumerate(view.segments):
        own = slice(index * group, (index + 1) * group)
        sinks = None if options.sinks is None else options.sinks[own]
        alone = view._replace(segments=(segment._replace(head=None),))
        asked = options._replace(sinks=sinks)
        out, mass = attend(q[:, own], alone, asked)
        outs.append(out)
        if mass is not None:
            masses.append(torch.nn.functional.pad(mass, (0, slots - mass.shape[2])))
    return torch.cat(outs, dim=1), torch.cat(masses, dim=1) if masses else None


def _check(q: Tensor, view: View, sinks: Tensor | None) -> None:
    key = unsliced(view.segments[-1].planes)["k"]
    heads = len(view.segments) if view.by_head else key.shape[1]
    if q.dim() != 4 or q.shape[2] != view.chunk or 0 in q.shape:
        raise ShapeError(
            f"queries {tuple(q.shape)} for a chunk of {view.chunk} tokens; give (B, Hq, n, Dk)"
        )
    if q.shape[1] % heads or key.shape[0] not in (1, q.shape[0]):
        raise ShapeError(
            f"queries {tuple(q.shape)} on keys {tuple(key.shape)}: query heads must be a multiple "
            "of the kv heads, and the rows the same"
        )
    check_sinks(q, sinks)
