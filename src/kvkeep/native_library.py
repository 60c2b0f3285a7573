"""Finds and loads the native library, which is built from `native/` and called through ctypes.

If no C++ compiler is present at installation, kvkeep installs without the library and uses tensor
operations instead. The wheel for all platforms has no library either.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import c_char_p, c_int, c_int64, c_void_p
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from struct import Struct

import torch

from kvkeep.errors import UnsupportedError


def _path() -> Path | None:
    """The library's file: $KVKEEP_NATIVE, in this package, or of an editable install."""
    if chosen := os.environ.get("KVKEEP_NATIVE"):
        return Path(chosen)
    beside = sorted(Path(__file__).parent.glob("attention/_native.*"))
    if beside:
        return beside[0]
    with suppress(PackageNotFoundError):
        for file in files("kvkeep") or ():
            if file.stem == "_native":
                return Path(str(file.locate()))
    return None


def _open(path: Path) -> ctypes.CDLL:
    """Load the library globally, so that compiled programs see its symbols. If torch has not loaded
    OpenMP globally, this first loads torch's copy of OpenMP, or else the system's."""
    try:
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError:
        own = [*Path(torch.__file__).parent.glob("lib/libgomp*")]
        for openmp in own or [Path("libgomp.so.1")]:
            with suppress(OSError):
                ctypes.CDLL(str(openmp), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and the instruction set it uses; or None and the reason."""
    path = _path()
    if path is None:
        return None, _NOT_BUILT
    try:
        library = _open(path)
        if library.kv_abi() != _ABI:
            return None, f"{path} was built for another version of kvkeep: install kvkeep again"
        library.kv_attend.argtypes = (c_char_p, c_char_p, c_char_p)
        library.kv_attend_plain.argtypes = (c_char_p,)
        library.kv_encode.argtypes = (c_char_p,)
        library.kv_linear.argtypes = (c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)
        library.kv_lowest.argtypes = (c_char_p,)
        evict = library.kv_evict
        evict.argtypes = (c_char_p, *[c_int64] * 2, c_void_p, *[c_int64] * 4, c_char_p, c_int64)
        library.kv_use_torch.argtypes = (c_char_p,)
        library.kv_use_torch.restype = None
        library.kv_run_program.argtypes = (c_char_p, c_char_p, c_int64, *[c_void_p] * 2, c_int64)
        library.kv_drop.argtypes = (c_void_p, c_int64)
        library.kv_drop.restype = None
        library.kv_step.argtypes = (c_char_p, c_int64, c_char_p)
        library.kv_instructions.restype = c_char_p
        library.kv_use_instructions.argtypes = (c_char_p,)
        library.kv_use_instructions.restype = c_int
    except OSError as error:
        return None, f"cannot be loaded: {error}"
    except AttributeError:
        return None, f"{path} was built for another version of kvkeep: install kvkeep again"
    chosen = os.environ.get("KVKEEP_INSTRUCTIONS")
    if chosen and library.kv_use_instructions(chosen.encode()):
        best = library.kv_instructions().decode()
        raise UnsupportedError(
            f"KVKEEP_INSTRUCTIONS={chosen}: this processor or this build lacks that instruction "
            f"set; unset the variable to use {best}, or give one of {', '.join(INSTRUCTION_SETS)}"
        )
    return library, library.kv_instructions().decode()


_FUNCTIONS = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_empty_strided",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_cpu_mm_out",
    "torch_get_num_threads",
    "aoti_torch_get_device_type",
    "aoti_torch_get_layout",
    "aoti_torch_get_storage_offset",
    "aoti_torch_get_storage_size",
)
"""The torch functions in KvTorch of native/abi.h."""
_TORCH = Struct("=15q")


def use_torch(library: ctypes.CDLL, step: int = 0) -> None:
    """Give the library torch's functions, with which it reads tensors.

    Args:
        step: the address of KvTorch.step; 0: none.

    Raises:
        OSError: torch's library is not found.
        AttributeError: it lacks a function.
    """
    found = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    own = ctypes.CDLL(str(next(found, "libtorch_cpu")))
    addresses = [ctypes.cast(getattr(own, name), c_void_p).value for name in _FUNCTIONS]
    library.kv_use_torch(_TORCH.pack(*addresses, step))


INSTRUCTION_SETS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
"""Instruction sets that the library may have code for, the fastest first. KVKEEP_INSTRUCTIONS
selects one; by default it is the fastest that the processor has."""


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype -> KvType of native/abi.h."""

_NOT_BUILT = (
    "not built: install a C++ compiler (GCC or clang), then reinstall kvkeep from source "
    "(with pip's option --no-binary kvkeep)"
)
_ABI = 28  # KV_ABI of native/abi.h

LIBRARY, reason = _load()
available = LIBRARY is not None
_in_use = reason if available else ""


def address_of(record: bytes) -> int:
    """Address of a packed record, valid as long as the caller keeps the record."""
    return ctypes.cast(c_char_p(record), c_void_p).value or 0


def use_instructions(name: str) -> None:
    """Switch to instruction set `name`, for tests and benchmarks.

    Args:
        name: one of `INSTRUCTION_SETS`.

    Raises:
        UnsupportedError: this processor or this build lacks the instruction set.
    """
    global _in_use
    if LIBRARY is None or LIBRARY.kv_use_instructions(name.encode()):
        raise UnsupportedError(f"no instruction set {name!r} here; there is {instructions()}")
    _in_use = name


def instructions() -> str:
    """The instruction set in use; empty without the library."""
    return _in_use
