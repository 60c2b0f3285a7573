"""Recorded calls as the native library repeats them, without Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, NamedTuple

from torch import Tensor

from kvkeep.graph.ready import Ready
from kvkeep.linears import Arguments
from kvkeep.native_library import LIBRARY, address_of

_MOST = 16  # KV_ARGUMENTS of native/abi.h
_RECORD, _STEP = Struct(f"={3 + _MOST}q"), Struct(f"=3q{8 * _MOST}s")
"""KvRecorded, also with its arguments packed already."""

_OTHER, _KERNEL, _LINEAR, _MADE_STEP = range(4)  # KvRecordedKind


class NativeCall(NamedTuple):
    """A call that the library can make. The caller keeps the memory that it refers to."""

    kind: int
    function: int = 0
    arguments: tuple[int, ...] = ()

    @classmethod
    def of_kernel(cls, kernel: Any, args: Sequence[Any]) -> NativeCall | None:
        """Of a kernel that torch's compiler made; None if it takes anything but tensors."""
        if len(args) > _MOST or not all(isinstance(x, Tensor) for x in args):
            return None
        with suppress(OSError, AttributeError):
            # The library of the module that wraps it.
            function = ctypes.CDLL(kernel.__self__.__file__).kernel
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            return cls(_KERNEL, address, tuple(x.data_ptr() for x in args))
        return None

    @classmethod
    def of_linears(cls, arguments: Arguments) -> NativeCall:
        return cls(_LINEAR, 0, (address_of(arguments[0]), *arguments[1:]))

    @classmethod
    def of_step(cls) -> NativeCall:
        """Of a step, whose arguments `NativeCalls.set_step` sets."""
        return cls(_OTHER)

    @property
    def is_kernel(self) -> bool:
        return self.kind == _KERNEL


class NativeCalls:
    """A list of calls in memory; None: a call that only the caller can make."""

    def __init__(self, calls: Sequence[NativeCall | None]) -> None:
        packed = bytearray()
        for call in calls:
            kind, function, given = call or NativeCall(_OTHER)
            filled = (*given, *[0] * (_MOST - len(given)))
            packed += _RECORD.pack(kind, function, len(given), *filled)
        self._memory = ctypes.create_string_buffer(bytes(packed), len(packed))
        self._address = ctypes.addressof(self._memory)
        self._result = ctypes.c_int64()

    def set_step(self, index: int, step: Ready | None) -> None:
        """Let call `index` make a step; None: the caller makes it."""
        if step is None:
            _RECORD.pack_into(self._memory, index * _RECORD.size, _OTHER, *[0] * (2 + _MOST))
        else:
            place = index * _RECORD.size
            _STEP.pack_into(self._memory, place, _MADE_STEP, 0, 0, step.call.arguments)

    def make(self, first: int, end: int) -> tuple[int, int]:
        """Make calls `first` to `end` - 1.

        Returns:
            `end`, or the first call that did not succeed; and the KvStepResult.
        """
        assert LIBRARY is not None
        result = self._result
        stopped = LIBRARY.kv_repeat(self._address, first, end, ctypes.byref(result))
        return stopped, result.value
