"""Tensors to a safetensors file, straight from where they lie: a cache that fills half of the
memory can be saved, for none of it is copied. Files are read by the safetensors library.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from kvkeep.files import whole_file, write_all

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
    """Write a file, which is replaced as a whole or not at all; see `whole_file`."""
    # Large elements first, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    with whole_file(path, sync=sync) as file:
        write_all(file.fileno(), _header(tensors, order, metadata))
        for piece in _all_pieces(tensors, order):
            write_all(file.fileno(), piece)


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
