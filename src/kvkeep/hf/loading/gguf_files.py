"""Checks GGUF files before another library reads them, because it does not check lengths.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvkeep.errors import ModelError, reason_of
from kvkeep.extras import needed_by
from kvkeep.reading import open_file, read_into

_VERSIONS = (2, 3)
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9
_MOST_HEADER = 1 << 26
_MOST_BUFFERS = 1 << 24
_MOST_AXES = 4
_FEWEST_PAIR, _FEWEST_TENSOR = 13, 24  # bytes of a pair of the metadata, and of a tensor's entry
_LAYER = re.compile(r"blk\.(\d{1,6})\.")


class _Reader:
    """Reads a header from the file's first bytes. Every length is compared with the bytes left."""

    def __init__(self, data: bytearray) -> None:
        self._data, self.place = data, 0

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack_from("<" + code, self._data, self._take(size))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self._take(size)
        return self._data[start : start + size].decode()

    def count(self, fewest: int) -> int:
        """A number of items that take at least `fewest` bytes each."""
        count: int = self.number("Q")
        if count * fewest > len(self._data) - self.place:
            raise ValueError(f"it would have {count} items at {self.place}")
        return count

    def value(self, kind: int) -> Any:
        """A value; for an array, only its length."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_code(kind))
        inner = self.number("I")
        if inner == _TEXT:
            count = self.count(8)
            for _ in range(count):
                self._take(self.number("Q"))
            return count
        size = struct.calcsize(_code(inner))
        count = self.count(size)
        self._take(count * size)
        return count

    def _take(self, size: int) -> int:
        start = self.place
        if size > len(self._data) - start:
            raise ValueError(f"it ends within {size} bytes at {start}")
        self.place += size
        return start


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _NUMBERS[kind]


def config_in(path: Path) -> PreTrainedConfig:
    """The config of a model in a GGUF file, after checking that the model has no more parameters
    than the file.

    Raises:
        ModelError: the file cannot be read, is not a GGUF file, or its config describes a larger
            model.
        MissingPackageError: the packages that read GGUF files are not installed.
    """
    try:
        elements = elements_in(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check its access") from error
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{path} is not a GGUF file: {reason_of(error)}; download it again"
        ) from error
    config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = sum(p.numel() for p in model.parameters())
    buffers = sum(x.numel() for x in model.buffers())
    if found > elements or buffers > elements + _MOST_BUFFERS:
        raise ModelError(
            f"{path} has the config of a model of {found} parameters and {buffers} other numbers, "
            f"but tensors of only {elements} numbers; download it again"
        )
    return config


def elements_in(path: Path) -> int:
    """The number of elements of all tensors in a GGUF file, after checking that its header agrees
    with its contents: all lengths and tensors end within the file, and the number of layers is
    right.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError, KeyError: it is not a GGUF file, or is damaged.
        MissingPackageError: the packages that read GGUF files are not installed.
    """
    with needed_by("Reading a GGUF file", "gguf"):
        import accelerate  # noqa: F401, PLC0415 (it may be missing, and transformers needs it)
        import gguf  # noqa: PLC0415

    with open_file(path) as handle:
        size = os.fstat(handle).st_size
        data = bytearray(min(size, _MOST_HEADER))
        read_into(handle, data, 0)
    if data[:4] != b"GGUF":
        raise ValueError(f"it begins with {bytes(data[:4])!r}, not b'GGUF'")
    read = _Reader(data)
    read.number("I")
    version = read.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"it is of version {version}, not of {_VERSIONS}")
    tensors = read.count(_FEWEST_TENSOR)
    pairs = read.count(_FEWEST_PAIR)
    fields = dict[str, Any]()
    for _ in range(pairs):
        name = read.text()
        fields[name] = read.value(read.number("I"))
    entries = [_entry(read, gguf) for _ in range(tensors)]
    elements = _require_content(entries, size - read.place)
    layers = {int(found[1]) for name, *_ in entries if (found := _LAYER.match(name))}
    largest = max((max(shape, default=1) for _, shape, *_ in entries), default=0)
    for name, value in fields.items():
        if name.endswith(".block_count") and value != len(layers):
            raise ValueError(f"{name} is {value}, but it has tensors of {len(layers)} layers")
        counted = isinstance(value, int) and 0 <= value <= largest
        if name.endswith(".expert_count") and not counted:
            raise ValueError(f"{name} is {value}, but no tensor has more than {largest} rows")
    return elements


def _entry(read: _Reader, gguf: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape, offset and bytes."""
    name, axes = read.text(), read.number("I")
    if axes > _MOST_AXES:
        raise ValueError(f"tensor {name[:50]!r} has {axes} axes")
    shape = tuple(read.number("Q") for _ in range(axes))
    kind, offset = read.number("I"), read.number("Q")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    if shape and shape[0] % block:
        raise ValueError(f"tensor {name[:50]!r} has rows of {shape[0]}, in blocks of {block}")
    return name, shape, offset, math.prod(shape) // block * nbytes


def _require_content(entries: list[tuple[str, tuple[int, ...], int, int]], most: int) -> int:
    """The elements of all tensors, after checking that no two tensors share bytes and all end
    within `most` bytes."""
    end = 0
    for name, _, offset, nbytes in sorted(entries, key=lambda entry: entry[2:]):
        if offset < end or offset + nbytes > most:
            raise ValueError(f"tensor {name[:50]!r} has bytes {offset} to {offset + nbytes}")
        end = offset + nbytes
    return sum(math.prod(shape) for _, shape, *_ in entries)
