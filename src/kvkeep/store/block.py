"""StoredBlock: the slots of a run of tokens in a backend, and the keys of blocks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkeep.files import tensor_file
from kvkeep.files.headers import DTYPES, require_seal, sealed, typed
from kvkeep.files.tensor_file import Layout
from kvkeep.geometry import Geometry
from kvkeep.store.compressed import Compressed
from kvkeep.store.geometry import ModelGeometry
from kvkeep.store.layer_slices import Stretch

FORMAT = 3
"""The only version of the block format that is written and read."""

LABEL_BYTES = 1 << 18
"""A block's first bytes that are read for its `Label`; enough for thousands of planes."""

HEADER_BYTES = 1 << 22
"""The longest header that is read, in bytes; enough for ten thousand planes. A compressed text has
separate planes for each head of each layer."""

_MOST_LAYERS = 1 << 12
_MOST = 1 << 20  # heads, or the width of a key or a value
_KEY = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{72,80}")
_START = re.compile(r"[0-9a-f/]*")

DIGEST = 64
"""Number of characters of the hash of a block's tokens, at the end of its key."""

_HEADER = "kvkeep_block"
_MARK = "mark"  # prefix of the names of recurrent states


@dataclass(frozen=True)
class _Header:
    format: int
    identity: str
    prefix: str
    routed: bool | None
    compressed: bool
    likes: list[object]
    checksums: dict[str, str]


@contextmanager
def _parse_errors() -> Iterator[None]:
    """Turn any error from parsing untrusted bytes into ValueError."""
    try:
        yield
    except MemoryError:  # the bytes may be valid
        raise
    except Exception as error:
        raise ValueError(f"not a kvkeep block: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Named:
    identity: str
    prefix: str
    tokens: Tensor

    @property
    def key(self) -> str:
        """The block's key, `identity/prefix/tokens`: three hashes. The block's first token, in
        hexadecimal, precedes the third."""
        return key_of(self.identity, self.prefix, self.tokens)


@dataclass(frozen=True)
class StoredBlock(_Named):
    """Tokens after a known prefix, with the layers' slots; or a compressed text.

    Args:
        identity: see `PrefixStore`.
        prefix: hash of the tokens before the block.
        tokens: the block's own tokens, int64 (n,).
        routed: see `kvkeep.cache.Cache.routed`.
        geometries: the geometry of each layer, for one row.
    """

    content: Stretch
    routed: bool | None
    geometries: Sequence[Geometry]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the block, by name."""
        found = {
            f"{index}.{name}": planes[name]
            for index, planes in enumerate(self.content.layers)
            for name in planes
        }
        for at, mark in self.content.marks.items():
            found |= {f"{_MARK}.{at}.{name}": x for name, x in mark.items()}
        return found | {"tokens": self.tokens}

    def metadata(self) -> dict[str, str]:
        """The header that describes the tensors, with a checksum of each."""
        header = {
            "format": FORMAT,
            "identity": self.identity,
            "prefix": self.prefix,
            "routed": self.routed,
            "compressed": isinstance(self.content, Compressed),
            "likes": [[*one[1:4], str(one.dtype)] for one in self.geometries],
            "checksums": self._checksums,
        }
        return sealed(_HEADER, header)

    @cached_property
    def _checksums(self) -> dict[str, str]:
        return {name: tensor_file.checksum(x) for name, x in self.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Length of `to_bytes()`, header included."""
        return tensor_file.size(self.tensors(), self.metadata())

    def to_bytes(self) -> bytes:
        """The block in the safetensors format."""
        return tensor_file.to_bytes(self.tensors(), self.metadata())

    def why_not(
        self,
        geometry: ModelGeometry,
        kind: type[Stretch],
        start: int = 0,
        held: Sequence[Tensor] | None = None,
    ) -> str:
        """Why the block does not fit a model; empty if it does.

        Args:
            geometry: the model's geometry.
            kind: the expected class of the content.
            start: the position of the block's first token.
            held: the positions of the slots in each layer, int32 (n,); None: those of the tokens.
        """
        content = self.content
        if type(content) is not kind:
            return f"it is a {type(content).__name__}, not a {kind.__name__}"
        if self.routed != geometry.routed:
            return f"it was computed with routed={self.routed}, not {geometry.routed}"
        if not len(self.geometries) == len(content.layers) == len(geometry.layers):
            return f"it has {len(content.layers)} layers, not {len(geometry.layers)}"
        for index, (layer, found) in enumerate(zip(geometry.layers, self.geometries, strict=True)):
            said, own = found[1:5], layer.of_row[1:5]  # without the device
            if said != own:
                return f"layer {index} has heads, widths and dtype {said}, not {own}"
            reason = (
                content.why_not(index, layer, start)
                if held is None
                else content.why_not_at(index, layer, held[index])
            )
            if reason:
                return f"layer {index}{reason}"
        for at, mark in content.marks.items():
            if mark.keys() != geometry.states.keys():
                return f"the mark after {at} tokens has states {sorted(mark)[:3]}, not the model's"
            for name, spec in geometry.states.items():
                if reason := spec.why_not(mark[name], 1):
                    return f"state {name} after {at} tokens {reason}"
        return ""

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, key: str) -> StoredBlock:
        """Parse the output of `to_bytes`. The tensors share memory with `data` if it is a
        bytearray.

        Raises:
            ValueError: the bytes are damaged, or are another key's block.
        """
        with _parse_errors():
            own = data if isinstance(data, bytearray) else bytearray(data)
            block = cls._read(own, *_start(own))
        if block.key != key:
            raise ValueError(f"an intact block, but its key is {block.key}, not {key[:250]!r}")
        return block

    @classmethod
    def _read(cls, data: bytearray, layout: Layout, header: _Header, tokens: Tensor) -> StoredBlock:
        """Build a block, whose shapes are compared with a model's when it is used. May raise any
        exception."""
        if layout.nbytes != len(data):
            raise ValueError(f"{len(data)} bytes, but the header describes {layout.nbytes}")
        if set(layout.entries) != set(header.checksums):
            raise ValueError("the header and the data have different tensors")
        geometries = list(map(_geometry, header.likes))
        layers = {str(index): dict[str, Tensor]() for index in range(len(geometries))}
        marks: dict[int, dict[str, Tensor]] = {}
        for name in layout.entries:
            x = layout.tensor(name, data)
            if tensor_file.checksum(x) != header.checksums[name]:
                raise ValueError(f"the checksum of tensor {name} does not match")
            index, _, plane = name.partition(".")
            if plane and index in layers:
                layers[index][plane] = x
            elif plane and index == _MARK and not header.compressed:
                at, _, state = plane.partition(".")
                marks.setdefault(int(at), {})[state] = x
            elif name != "tokens":
                raise ValueError(f"tensor {name[:50]!r} belongs to no layer")
        if not all(0 < at <= len(tokens) for at in marks):
            raise ValueError(f"marks after {sorted(marks)[:8]} of {len(tokens)} tokens")
        kind = Compressed if header.compressed else Stretch
        content = kind(list(layers.values()), len(tokens), marks)
        return cls(header.identity, header.prefix, tokens, content, header.routed, geometries)


@dataclass(frozen=True)
class Label(_Named):
    """A block's description, read from its header without its slots.

    Args:
        identity, prefix, tokens: see `StoredBlock`.
        layers: number of layers.
        dtype: dtype of the keys before encoding.
        nbytes: length of `StoredBlock.to_bytes()`, header included.
        marks: numbers of tokens after which the block holds recurrent states.
    """

    layers: int
    dtype: str
    nbytes: int
    marks: frozenset[int] = frozenset()

    @classmethod
    def of(cls, block: StoredBlock) -> Label:
        """The label of a block."""
        kind = str(block.geometries[0].dtype)
        parts = (block.identity, block.prefix, block.tokens, len(block.geometries))
        return cls(*parts, kind, block.nbytes, frozenset(block.content.marks))

    @classmethod
    def read(cls, data: bytes | bytearray, key: str | None = None) -> Label:
        """Parse a label from the first bytes of a block.

        Args:
            key: the block's key, if it is known.

        Raises:
            ValueError: there are too few bytes, or they are not the start of the key's block.
        """
        with _parse_errors():
            layout, header, tokens = _start(data)
            kind = str(_geometry(header.likes[0]).dtype)
            parts = (header.identity, header.prefix, tokens, len(header.likes))
            named = [name.split(".") for name in layout.entries]
            marks = frozenset(int(parts[1]) for parts in named if parts[0] == _MARK)
            label = cls(*parts, kind, layout.nbytes, marks)
            if label.key != (key or label.key):
                raise ValueError("the label belongs to another key")
            return label


def _start(data: bytes | bytearray) -> tuple[Layout, _Header, Tensor]:
    """Parse a block's header and its tokens, which are copied. May raise any exception."""
    layout = Layout.read(data, HEADER_BYTES)
    require_seal(_HEADER, layout.metadata)
    header = typed(_Header, json.loads(layout.metadata[_HEADER]))
    if header.format != FORMAT:
        raise ValueError(f"the block has format {header.format}; only {FORMAT} is read")
    if len(header.likes) > _MOST_LAYERS:
        raise ValueError(f"{len(header.likes)} layers, but at most {_MOST_LAYERS} are read")
    entry = layout.entries["tokens"]
    stop = layout.start + entry.stop
    if (
        entry.dtype != torch.int64
        or len(entry.shape) != 1
        or stop > len(data)
        or not entry.shape[0]
    ):
        raise ValueError("the tokens are not an int64 tensor (n,) within these bytes")
    return layout, header, layout.tensor("tokens", bytearray(data[:stop])).clone()


def _geometry(fields: Any) -> Geometry:
    heads, key_width, value_width, dtype = fields
    if not all(type(x) is int and 1 <= x <= _MOST for x in (heads, key_width, value_width)):
        raise ValueError(f"a layer has impossible sizes: {str(fields)[:80]}")
    return Geometry(1, heads, key_width, value_width, DTYPES[dtype])


def token_bytes(tokens: Tensor) -> bytes:
    """The bytes of tokens, int64 (n,), for hashing."""
    found: bytes = tokens.contiguous().numpy().tobytes()
    return found


def digest(tokens: Tensor) -> str:
    """A collision-resistant hash of tokens, int64 (n,)."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()


def beginning(identity: str, prefix: str, token: int) -> str:
    """The common start of the keys of all blocks after `prefix` that begin with `token`."""
    own = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
    return f"{own}/{prefix}/{token:08x}"


def key_of(identity: str, prefix: str, tokens: Tensor) -> str:
    """The key of a block of tokens, (n,), that follow a prefix."""
    return beginning(identity, prefix, int(tokens[0])) + digest(tokens)


def starts_key(prefix: str) -> bool:
    """Whether `prefix` has only characters of keys."""
    return _START.fullmatch(prefix) is not None


def is_key(key: object) -> bool:
    """Whether `key` has the form of a block's key."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None
