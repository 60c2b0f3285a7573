"""Declarations of kvkeep's operators for programs compiled by AOTInductor: functions of the native
library (`native/program.cpp`), which need no Python if a step is prepared."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from struct import Struct
from threading import local
from typing import Any

import torch
from torch import Tensor

from kvkeep.graph import custom_ops
from kvkeep.graph.linear_op import grouped, linears
from kvkeep.layer.step import StepInputs
from kvkeep.native_library import LIBRARY, use_torch

_ARGUMENTS = {
    "Tensor": "AtenTensorHandle {}",
    "Optional[Tensor]": "const AtenTensorHandle* {}",
    "List[Tensor]": "const AtenTensorHandle* {0}, int64_t {0}_count",
    "List[Optional[Tensor]]": "const AtenTensorHandle** {0}, int64_t {0}_count",
    **{"int": "int64_t {}", "float": "double {}", "Optional[float]": "double* {}"},
    "Device": "int32_t {0}, int32_t {0}_index",
}
"""C declarations of arguments by their type in an operator's schema."""


def _declared(operator: Any) -> str:
    """The C declaration of the function that computes an operator, for AOTInductor."""
    given = [_ARGUMENTS[str(x.type)].format(x.name) for x in operator._schema.arguments]
    name = f"aoti_torch_cpu_{operator._schema.name.partition('::')[2]}"
    return f"AOTITorchError {name}({', '.join(given)}, AtenTensorHandle* out)"


_OPERATORS = (custom_ops.fed, custom_ops.next_positions, custom_ops.step, linears, grouped)
SHIMS = {operator: [_declared(operator)] for operator in _OPERATORS}
"""C declarations of the functions that compute operators, for AOTInductor."""

DTYPES = {
    **{0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64},
    **{5: torch.float16, 6: torch.float32, 7: torch.float64, 11: torch.bool, 15: torch.bfloat16},
}
"""Tensor dtypes of a program's inputs and results, by torch's ScalarType."""
_MADE = 1  # KV_MADE of native/abi.h
TENSOR = Struct("=5q")  # KvTensor of native/abi.h
_TRACED = Struct("=q320s2d")
_raised = local()


@cache
def connect() -> None:
    """Give the native library a callback that runs steps in Python."""
    assert LIBRARY is not None
    use_torch(LIBRARY, ctypes.cast(_called_step, c_void_p).value or 0)


def raised() -> BaseException | None:
    """The error of this thread's last step in Python for a program; None: no error, or an interrupt
    outside of the code that records it."""
    error: BaseException | None = getattr(_raised, "error", None)
    _raised.error = None
    return error


def _step(address: int) -> int:
    """Run an unprepared step, given a KvTracedStep; return `_MADE`, or 0 after an error."""
    try:
        _make_step(address)
    except BaseException as error:  # it cannot propagate through the program
        _raised.error = error
        return 0
    return _MADE


_called_step = ctypes.CFUNCTYPE(c_int32, c_void_p)(_step)


def _make_step(address: int) -> None:
    packed = ctypes.string_at(address, _TRACED.size)
    number, tensors, scale, softcap = _TRACED.unpack(packed)
    given: Any = map(tensor_at, TENSOR.iter_unpack(tensors))
    q, k, v, position, sinks, until, bias, out = given
    inputs = StepInputs(q, k, v, position, scale, softcap or None, sinks, until, bias)
    out.copy_(custom_ops.ticket_of(number).make(inputs))


def tensor_at(described: tuple[int, ...]) -> Tensor | None:
    """A view of the memory of a KvTensor; None if it describes no tensor."""
    data, at_sizes, at_strides, dim, kind = described
    if not data:
        return None
    numbers: Any = c_int64 * dim
    sizes, strides = ([*numbers.from_address(at)] if dim else [] for at in (at_sizes, at_strides))
    dtype = DTYPES[kind]
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)
