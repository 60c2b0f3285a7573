"""The shared library of an AOTInductor program, called through its C interface.

torch's own loader holds the GIL while a program runs, so no other thread of a server could run. The
interface is declared in torch's `aoti_runtime/interface.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_size_t, c_void_p
from pathlib import Path
from struct import Struct
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from kvkeep.graph.shims import DTYPES, TENSOR, tensor_at
from kvkeep.native_library import LIBRARY, address_of

_TYPES = {dtype: number for number, dtype in DTYPES.items()}
_PROXY = b"aoti_torch_proxy_executor_call_function"
_ALIGNED = 64  # bytes of the smallest constant
_PROGRAM = Struct("=2q")  # KvProgram of native/abi.h


class CompiledLibrary:
    """A compiled program in memory. One thread at a time runs it.

    Args:
        path: the shared library.

    Raises:
        RuntimeError: the library holds weights, or calls operators that have no C interface.
        OSError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        if _PROXY in path.read_bytes():
            raise RuntimeError(f"{path.name} calls operators through torch's dispatcher")
        library = ctypes.CDLL(str(path))
        container = c_void_p()
        _call(library, "CreateWithDevice", ctypes.byref(container), c_size_t(1), b"cpu", None)
        finalize(self, library.AOTInductorModelContainerDelete, container)
        if not _holds_numbers_only(library, container):
            raise RuntimeError(f"{path.name} holds weights")
        self._library = library
        run = ctypes.cast(library.AOTInductorModelContainerRunSingleThreaded, c_void_p).value
        self._record = _PROGRAM.pack(run, container.value)
        self._given: list[Tensor | None] = [None] * _number(library, "GetNumInputs", container)
        self._axes = [b""] * len(self._given)
        self._inputs = bytearray(TENSOR.size * len(self._given))
        self._made: Any = (c_void_p * _number(library, "GetNumOutputs", container))()
        self._results = ctypes.create_string_buffer(TENSOR.size * len(self._made))

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Run the program without the GIL.

        Args:
            given: the inputs, on the CPU.

        Returns:
            The results, in newly allocated memory.

        Raises:
            RuntimeError: the program fails, or there is no memory.
        """
        assert LIBRARY is not None
        for place, (x, known) in enumerate(zip(given, self._given, strict=True)):
            if x is not known:
                self._describe(place, x)
        inputs = (ctypes.c_char * len(self._inputs)).from_buffer(self._inputs)
        outputs = len(self._made)
        if LIBRARY.kv_run_program(
            self._record, inputs, len(given), self._results, self._made, outputs
        ):
            raise RuntimeError(f"a compiled step failed: {self._last_error()}")
        try:
            found = [tensor_at(x) for x in TENSOR.iter_unpack(self._results)]
            return [x.clone() for x in found if x is not None]
        finally:
            LIBRARY.kv_drop(self._made, outputs)

    def _last_error(self) -> str:
        """This thread's last error; empty if none was recorded, as when memory is short."""
        text = c_char_p()
        self._library.AOTInductorGetLastError(ctypes.byref(text))
        return (text.value or b"").decode(errors="replace")

    def _describe(self, place: int, x: Tensor) -> None:
        """Describe an input; weights, the same tensors in each step, are described only once."""
        axes = self._axes[place] = Struct(f"={2 * x.dim()}q").pack(*x.shape, *x.stride())
        at = address_of(axes)
        TENSOR.pack_into(
            self._inputs,
            place * TENSOR.size,
            *(x.data_ptr(), at, at + 8 * x.dim(), x.dim(), _TYPES[x.dtype]),
        )
        self._given[place] = x


def _holds_numbers_only(library: ctypes.CDLL, container: c_void_p) -> bool:
    """Whether each constant is one integer: torch passes the group size of 4-bit weights so."""
    size, dtype = c_size_t(), ctypes.c_int32()
    for place in map(c_size_t, range(_number(library, "GetNumConstants", container))):
        _call(library, "GetConstantDataSize", container, place, ctypes.byref(size))
        _call(library, "GetConstantDtype", container, place, ctypes.byref(dtype))
        if size.value > _ALIGNED or dtype.value != _TYPES[torch.int64]:
            return False
    return True


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    if getattr(library, f"AOTInductorModelContainer{name}")(*arguments):
        raise RuntimeError(f"{name} of a compiled step fails")


def _number(library: ctypes.CDLL, name: str, container: c_void_p) -> int:
    found = c_size_t()
    _call(library, name, container, ctypes.byref(found))
    return found.value
