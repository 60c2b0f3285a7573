"""Reading and writing of safetensors files.

Tensors are written without a copy, so a cache that fills half of the memory can be saved. Files are
untrusted input: the header is parsed within limits and must describe every byte after it; otherwise
the file is refused before memory is allocated for it.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from kvkeep.files.atomic import whole_file, write_all

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
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
MOST_HEADER = 1 << 24
"""Longest header written, in bytes, and the default limit for reading."""

_ALIGNED = 8
_PART_BYTES = 16  # each list or object of a valid header is longer; bounds the parsing time
_MOST_AXES = 8
_MOST_BYTES = 1 << 48  # more than any file


class Entry(NamedTuple):
    """A tensor's dtype, shape, and byte range relative to the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def tensor(self, data: bytearray, place: int = 0) -> Tensor:
        """The tensor at byte offset `place` of `data`, whose memory it shares.

        Raises:
            ValueError: the offset is not aligned to the dtype.
        """
        if self.start == self.stop:
            return torch.empty(self.shape, dtype=self.dtype)
        if place % self.dtype.itemsize:
            raise ValueError(f"a tensor of {self.dtype} begins at byte {place}, not aligned")
        count = math.prod(self.shape)
        flat = torch.frombuffer(data, dtype=self.dtype, count=count, offset=place)
        return flat.view(self.shape)


class HeaderError(ValueError):
    """A header is too long to be read back."""


@dataclass(frozen=True)
class Layout:
    """The content of a file's header: tensors, metadata, and the offset of the first tensor."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.start + max((entry.stop for entry in self.entries.values()), default=0)

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview[int], most: int) -> Layout:
        """Parse the first bytes of a file.

        Args:
            most: longest header accepted, in bytes.

        Raises:
            ValueError: the bytes are not a valid header, or the header is incomplete.
        """
        stop = _ALIGNED + header_bytes(data, most)
        if stop > len(data):
            raise ValueError(f"its header ends at {stop}, the file at {len(data)}")
        text = bytes(data[_ALIGNED:stop])
        if text.count(b"[") + text.count(b"{") > most // _PART_BYTES:
            raise ValueError("its header has more lists and objects than a valid one of its length")
        try:
            fields = json.loads(text)
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
        if not isinstance(fields, dict):
            raise ValueError("its header is not a JSON object")
        metadata = fields.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise ValueError("its metadata does not map names to text")
        entries = {name: _entry(name, field) for name, field in fields.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end:
                raise ValueError(f"tensor {name} begins at {entry.start}, not {end}")
            end = entry.stop
        return cls(entries, metadata, stop)

    def tensor(self, name: str, data: bytearray) -> Tensor:
        """A tensor of a file read into `data`, whose memory it shares.

        Raises:
            ValueError: the tensor's bytes are not aligned to its dtype.
        """
        entry = self.entries[name]
        return entry.tensor(data, self.start + entry.start)


def header_bytes(data: bytes | bytearray | memoryview[int], most: int) -> int:
    """The length of a header, from the first eight bytes of a file.

    Raises:
        ValueError: there are fewer than eight bytes, or the header is longer than `most`.
    """
    length = int.from_bytes(data[:_ALIGNED], "little")
    if len(data) < _ALIGNED or length > most:
        raise ValueError(f"its header would have {length} bytes, at most {most} are read")
    return length


def checksum(x: Tensor) -> str:
    """The XXH3 checksum of a tensor's bytes in contiguous order."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(x):
        hasher.update(piece)
    digest: str = hasher.hexdigest()
    return digest


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    sync: bool,
    private: bool = False,
    partial: Path | None = None,
    whole: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Write a file atomically; see `whole_file`.

    Args:
        whole: called for each tensor, in the order of `order`, when its bytes are written; returns
            the full tensor, of the same shape and dtype. For tensors sharded over processes.
    """
    with whole_file(path, sync=sync, private=private, partial=partial) as file:
        for piece in _file(tensors, metadata, whole):
            write_all(file.fileno(), piece)


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of the file that `write` would write."""
    return b"".join(_file(tensors, metadata))


def size(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Size in bytes of the file that `write` would write, header included."""
    content = sum(x.numel() * x.element_size() for x in tensors.values())
    return len(_header(tensors, order(tensors), metadata)) + content


def _file(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    whole: Callable[[Tensor], Tensor] = lambda x: x,
) -> Iterator[bytes | memoryview[int]]:
    names = order(tensors)
    yield _header(tensors, names, metadata)
    for name in names:
        yield from _pieces(whole(tensors[name]))


def order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The order of tensors in a file: largest elements first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _header(tensors: Mapping[str, Tensor], names: list[str], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
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
    if len(text) > MOST_HEADER:
        raise HeaderError(
            f"a header of {len(text)} bytes, but at most {MOST_HEADER} are read; save fewer notes"
        )
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, field: Any) -> Entry:
    """Parse a tensor's entry in an untrusted header."""
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of tensor {name[:50]!r} lacks or adds fields")
    kind, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None or not _counts(shape, _MOST_AXES) or not _counts(offsets, 2):
        raise ValueError(f"tensor {name[:50]!r} has an invalid entry {str(field)[:80]}")
    if len(offsets) != 2 or math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name[:50]!r} of {kind} {shape} does not have the bytes {offsets}"
        )
    return Entry(dtype, tuple(shape), *offsets)


def _counts(numbers: Any, most: int) -> bool:
    """Whether `numbers` is a list of at most `most` integers, each a possible file size."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= most
        and all(type(x) is int and 0 <= x <= _MOST_BYTES for x in numbers)
    )


def _pieces(x: Tensor) -> Iterator[memoryview[int]]:
    """A tensor's bytes, in contiguous pieces."""
    x = x.detach().cpu()
    if x.is_contiguous() or x.dim() < 2 or x[0].numel() * x.element_size() < 1 << 12:
        if x.numel():
            yield x.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return
    for part in x:
        yield from _pieces(part)
