"""Tensors to a safetensors file, straight from where they lie: a cache that fills half of the
memory can be saved, for none of it is copied. Files are read by the safetensors library.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from torch import Tensor

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ALIGNED = 8
_PARTIAL = ".kvkeep-partial"


def checksum(x: Tensor) -> str:
    """XXH3 of a tensor's bytes, as if it were contiguous."""
    found = xxhash.xxh3_128()
    for piece in _pieces(x):
        found.update(piece)
    digest: str = found.hexdigest()
    return digest


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, sync: bool
) -> None:
    """Write a file beside `path`, then rename it, so that nobody ever sees half of it there.

    Args:
        sync: wait until the disk has it, before and after it is renamed.

    Raises:
        OSError: it cannot be written; what was at `path` is as it was.
    """
    _sweep(path.parent)
    handle, partial = _new_partial(path.parent)
    try:
        with open(handle, "wb", buffering=0) as file:
            # Large elements first, so that each tensor is aligned.
            order = sorted(tensors, key=lambda name: -tensors[name].element_size())
            _write_all(file.fileno(), _header(tensors, order, metadata))
            for piece in _all_pieces(tensors, order):
                _write_all(file.fileno(), piece)
            if sync:
                os.fsync(file.fileno())
            partial.replace(path)  # while it is locked, or it would be taken for an abandoned one
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        _sync_directory(path.parent)


def _header(tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in order:
        x = tensors[name]
        stop = start + x.numel() * x.element_size()
        fields[name] = {
            "dtype": _TYPES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _all_pieces(tensors: Mapping[str, Tensor], order: list[str]) -> Iterator[memoryview[int]]:
    for name in order:
        yield from _pieces(tensors[name])


def _pieces(x: Tensor) -> Iterator[memoryview[int]]:
    """A tensor's bytes, in runs that lie side by side."""
    x = x.detach().cpu()
    if x.is_contiguous() or x.dim() < 2 or x[0].numel() * x.element_size() < 1 << 12:
        if x.numel():
            yield x.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return
    for part in x:
        yield from _pieces(part)


def _write_all(descriptor: int, piece: bytes | memoryview[int]) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_partial(directory: Path) -> tuple[int, Path]:
    """A new file, open and locked, as long as it is written."""
    while True:
        handle, name = tempfile.mkstemp(_PARTIAL, ".", directory)
        if _locked(handle) and Path(name).exists():
            return handle, Path(name)
        os.close(handle)  # taken for an abandoned one before it was locked


def _sweep(directory: Path) -> None:
    """Remove what killed processes left half-written: what nobody has locked."""
    for partial in directory.glob(f".*{_PARTIAL}"):
        with suppress(OSError), open(partial, "rb") as file:
            if _locked(file.fileno()):
                partial.unlink()


def _locked(handle: int) -> bool:
    """Whether a file can be locked, which it then is until it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
