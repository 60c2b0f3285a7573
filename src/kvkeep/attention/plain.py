"""Short calls of the native backend: one plain segment, of which each query sees all slots but
those after its own.

The library reads shapes, strides and addresses from torch's tensors and checks them, since in
Python that takes longer than attention over a few hundred slots.
"""

from __future__ import annotations

from struct import Struct

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from kvkeep.attention.native import new_output
from kvkeep.attention.options import Options
from kvkeep.attention.view import View
from kvkeep.checks import wants_gradients
from kvkeep.choice import rounded, torch_is_faster
from kvkeep.native_library import LIBRARY, use_torch
from kvkeep.packing import PLAIN
from kvkeep.planes import POSITION, Front

CALL = Struct("=7qd")  # KvPlainCall of native/abi.h
_FAILED = 1  # KV_PLAIN_FAILED of native/abi.h


def _reads_tensors() -> bool:
    """Whether there is a library, with torch's functions."""
    if LIBRARY is None:
        return False
    try:
        use_torch(LIBRARY)
    except (OSError, AttributeError):
        return False
    return True


_READS_TENSORS = _reads_tensors()


def attend_plain(q: Tensor, view: View, options: Options, *, measured: bool) -> Tensor | None:
    """Attention of q (B, Hq, n, Dk) over the view, (B, Hq, n, Dv) in q's dtype.

    Args:
        measured: leave calls to torch that it computes faster (`kvkeep.choice`).

    Returns:
        The result; or None if the call is another one, or needs an error of `check_call`.

    Raises:
        MemoryError: there is no scratch memory.
    """
    segments, position, ragged, reaches, bounds, chosen = view
    if ragged or reaches or len(segments) != 1 or not _READS_TENSORS or not options.only_scales:
        return None
    planes, key, value, rotation, head, own_rows, part, used = segments[0]
    if key.layout is not PLAIN or value.layout is not PLAIN or value.of_keys or part:
        return None
    if bounds is not None or chosen is not None or rotation is not None or is_compiling():
        return None
    if head is not None or own_rows is not None or used is not None:
        return None
    slots = -1
    if type(planes) is Front:
        slots, planes = planes.length, planes.whole
    k, v, place = planes.get("k"), planes.get("v"), planes.get(POSITION)
    if k is None or v is None or place is None:
        return None
    if not type(q) is type(k) is type(v) is type(place) is type(position) is Tensor:
        return None
    if not q.is_cpu or q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or peek_interpreter_stack():
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or wants_gradients(q, k, v):
        return None
    if measured:
        _, heads, n, width = q.shape
        held = k.shape[2] if slots < 0 else slots
        sizes = rounded(n), rounded(held), heads // max(1, k.shape[1]), width
        if torch_is_faster("attention", q.dtype, *sizes):
            return None
    out = new_output(q, v.shape[3])
    tensors = q._cdata, k._cdata, v._cdata, place._cdata, position._cdata, out.data_ptr()
    assert LIBRARY is not None
    result = LIBRARY.kv_attend_plain(CALL.pack(*tensors, slots, options.scale))
    if result == _FAILED:
        raise MemoryError(f"no scratch memory for attention over {view.slots} slots")
    return None if result else out
