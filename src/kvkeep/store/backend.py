"""Backend: storage for blocks of tokens outside the process, behind five required methods."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import SpecError
from kvkeep.files import tensor_file
from kvkeep.files.headers import DTYPES, require_seal, sealed, typed
from kvkeep.files.tensor_file import Layout
from kvkeep.geometry import Geometry
from kvkeep.storage.allocate import free_bytes
from kvkeep.store.compressed import Compressed
from kvkeep.store.layer_slices import Stretch

FORMAT = 3
"""Version of the block format that is written, and the only one that is read."""

LABEL_BYTES = 1 << 18
"""Bytes at the start of a block that contain its `Label`, unless it has thousands of planes."""

HEADER_BYTES = 1 << 22
"""Longest header of a block, in bytes: enough for ten thousand planes. A compressed text has some
for each head of each layer."""

MOST_BYTES = 1 << 32
"""Largest block, in bytes."""

_MOST_LAYERS = 1 << 12
_MOST_HEADS = _MOST_WIDTH = 1 << 20
_KEY = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{72,80}")

ABANDONED_S = 3600.0
"""Unreferenced files older than this many seconds are abandoned writes."""

_HEADER = "kvkeep_block"
_MARK = "mark"  # begins the names of recurrent states


class OtherBlockError(ValueError):
    """An intact block was found under the wrong key. The argument is its own key."""


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
class StoredBlock:
    """Tokens that follow a known prefix, and the layers' slots for them; or a compressed text.

    Args:
        identity: see `PrefixStore`.
        prefix: hash of the tokens before the block.
        tokens: the block's own tokens, int64 (n,).
        routed: see `kvkeep.cache.Cache.routed`.
        geometries: of one row of each layer.
    """

    identity: str
    prefix: str
    tokens: Tensor
    content: Stretch | Compressed
    routed: bool | None
    geometries: Sequence[Geometry]

    @property
    def key(self) -> str:
        """The block's key, `identity/prefix/own`: three hashes, the last one preceded by the
        block's first token in hexadecimal."""
        return key_of(self.identity, self.prefix, self.tokens)

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
            "checksums": {name: tensor_file.checksum(x) for name, x in self.tensors().items()},
        }
        return sealed(_HEADER, header)

    def to_bytes(self) -> bytes:
        """The block in the safetensors format."""
        return tensor_file.to_bytes(self.tensors(), self.metadata())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, key: str) -> StoredBlock:
        """Parse the output of `to_bytes`. The tensors share memory with `data` if it is a
        bytearray.

        Raises:
            ValueError: the bytes differ from what was written.
            OtherBlockError: the block is intact, but its key is not `key`.
        """
        with _parse_errors():
            layout = Layout.read(data, HEADER_BYTES)
            if layout.nbytes != len(data):
                raise ValueError(f"{len(data)} bytes, but the header describes {layout.nbytes}")
            own = data if isinstance(data, bytearray) else bytearray(data)
            tensors = {name: layout.tensor(name, own) for name in layout.entries}
            block = cls._read(tensors, layout.metadata)
        if block.key != key:
            raise OtherBlockError(block.key)
        return block

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> StoredBlock:
        """Build a block from the results of `tensors` and `metadata`. May raise any exception."""
        header = _header(metadata)
        if set(tensors) != set(header.checksums):
            raise ValueError("the header lists other tensors than the data holds")
        if len(header.likes) > _MOST_LAYERS:
            raise ValueError(f"{len(header.likes)} layers, but at most {_MOST_LAYERS} are read")
        geometries = [_geometry(fields) for fields in header.likes]
        numbers = {str(number): number for number in range(len(geometries))}
        layers: list[dict[str, Tensor]] = [{} for _ in geometries]
        marks: dict[int, dict[str, Tensor]] = {}
        for name, x in tensors.items():
            if tensor_file.checksum(x) != header.checksums[name]:
                raise ValueError(f"the checksum of tensor {name} does not match")
            index, dot, plane = name.partition(".")
            if dot and index in numbers:
                layers[numbers[index]][plane] = x
            elif dot and index == _MARK and not header.compressed:
                at, _, state = plane.partition(".")
                marks.setdefault(int(at), {})[state] = x
            elif name != "tokens":
                raise ValueError(f"tensor {name[:50]!r} belongs to no layer")
        tokens = tensors["tokens"]
        if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype}; expected int64 (n,)"
            )
        content: Stretch | Compressed
        if header.compressed:
            content = Compressed(layers, len(tokens))  # its shapes are checked when it is used
        else:
            content = Stretch(layers, len(tokens), marks)
            if not all(0 < at <= len(tokens) for at in marks):
                raise ValueError(f"marks after {sorted(marks)[:8]} of {len(tokens)} tokens")
            for geometry, planes in zip(geometries, layers, strict=True):
                shapes = {(1, heads, len(tokens)) for heads in (1, geometry.heads)}
                for name, x in planes.items():
                    if x.shape[:3] not in shapes:
                        raise ValueError(f"plane {name} has the wrong shape {tuple(x.shape)}")
        if not content.nbytes:
            raise ValueError("the block holds no slots")
        return cls(header.identity, header.prefix, tokens, content, header.routed, geometries)


@dataclass(frozen=True)
class Label:
    """A block's description, read from its header without reading its slots.

    Args:
        identity, prefix, tokens: see `StoredBlock`.
        layers: number of layers.
        dtype: dtype of the keys before they were encoded.
        nbytes: length of `StoredBlock.to_bytes()`, header included.
        marks: after how many of the tokens it holds the states of recurrent layers.
    """

    identity: str
    prefix: str
    tokens: Tensor
    layers: int
    dtype: str
    nbytes: int
    marks: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """See `StoredBlock.key`."""
        return key_of(self.identity, self.prefix, self.tokens)

    @classmethod
    def of(cls, block: StoredBlock) -> Label:
        """The label of a block."""
        kind = str(block.geometries[0].dtype)
        parts = (block.identity, block.prefix, block.tokens, len(block.geometries))
        size = tensor_file.size(block.tensors(), block.metadata())
        return cls(*parts, kind, size, frozenset(block.content.marks))

    @classmethod
    def read(cls, data: bytes, key: str | None = None) -> Label:
        """Parse a label from the first bytes of a block.

        Args:
            key: the block's key, if it is known.

        Raises:
            ValueError: the bytes are not the start of that block, or too few.
        """
        with _parse_errors():
            layout = Layout.read(data, HEADER_BYTES)
            header = _header(layout.metadata)
            entry = layout.entries["tokens"]
            stop = layout.start + entry.stop
            if entry.dtype != torch.int64 or len(entry.shape) != 1 or stop > len(data):
                raise ValueError("the tokens are not an int64 tensor within these bytes")
            tokens = layout.tensor("tokens", bytearray(data[:stop])).clone()
            kind = str(_geometry(header.likes[0]).dtype)
            parts = (header.identity, header.prefix, tokens, len(header.likes))
            named = [name.split(".") for name in layout.entries]
            marks = frozenset(int(parts[1]) for parts in named if parts[0] == _MARK)
            label = cls(*parts, kind, layout.nbytes, marks)
            if label.key != (key or label.key):
                raise ValueError("the label belongs to another key")
            return label


def _header(metadata: Mapping[str, str]) -> _Header:
    require_seal(_HEADER, metadata)
    header = typed(_Header, json.loads(metadata[_HEADER]))
    if header.format != FORMAT:
        raise ValueError(f"the block has format {header.format}; only {FORMAT} is read")
    return header


def _geometry(fields: Any) -> Geometry:
    heads, key_width, value_width, dtype = fields
    for number, most in (
        (heads, _MOST_HEADS),
        (key_width, _MOST_WIDTH),
        (value_width, _MOST_WIDTH),
    ):
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"a layer has impossible sizes: {str(fields)[:80]}")
    return Geometry(1, heads, key_width, value_width, DTYPES[dtype])


def token_bytes(tokens: Tensor) -> bytes:
    """The bytes of tokens, int64 (n,), that are hashed."""
    found: bytes = tokens.contiguous().numpy().tobytes()
    return found


def digest(tokens: Tensor) -> str:
    """A collision-resistant hash of tokens, int64 (n,)."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()


def beginning(identity: str, prefix: str, token: int) -> str:
    """The common start of the keys of all blocks that follow `prefix` and begin with `token`."""
    own = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
    return f"{own}/{prefix}/{token:08x}"


def key_of(identity: str, prefix: str, tokens: Tensor) -> str:
    """The key of a block of tokens, (n,), that follow a prefix."""
    return beginning(identity, prefix, int(tokens[0])) + digest(tokens)


def is_key(key: object) -> bool:
    """Whether `key` has the form of a block's key."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def most_bytes() -> int:
    """Largest block that may be read now, in bytes; a larger one would not fit in free memory."""
    free = free_bytes(torch.device("cpu"))
    return MOST_BYTES if free is None else min(MOST_BYTES, free)


def require_budget(budget: int | None) -> None:
    """Raise SpecError for a budget below one byte."""
    if budget is not None and budget < 1:
        raise SpecError(f"a store's budget of {budget} bytes; give at least 1, or None")


class Backend(ABC):
    """Storage for blocks. Several processes may share one, and threads may call it at the same
    time. A failure of the storage is reported as
    a miss and counted in `failures`; it never raises in the caller.

    The methods that are not abstract are implemented with the five that are; a backend whose calls
    cost a network round trip each should override them.
    """

    name: ClassVar[str]

    failures: int = 0
    """Number of failed calls; `last_error` describes the latest."""
    last_error: str = ""

    damaged: int = 0
    """Number of blocks that were damaged or did not match their key."""

    @abstractmethod
    def get(self, key: str, *, used: bool = True) -> StoredBlock | None:
        """The block of a key, verified, or None. `used=False` leaves its time of last use as it
        is."""

    @abstractmethod
    def put(self, block: StoredBlock) -> bool:
        """Store a block unless it exists already. Returns False if that failed."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether a block exists; `get` may still find it damaged."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a block if it exists."""

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[str]:
        """Iterate over the keys that start with `prefix`."""

    def as_one_call(self) -> AbstractContextManager[None]:
        """A context in which all calls of this thread share the deadline of one call. The default
        has no deadline."""
        return nullcontext()

    def quarantine(self, key: str) -> None:
        """Move a block that is damaged or does not match its key out of reach, so that it is never
        returned again. The default deletes it."""
        self.damaged += 1
        self.delete(key)

    def leading(self, keys: Sequence[str]) -> list[StoredBlock]:
        """The blocks of `keys` in order, up to the first that is missing."""
        found: list[StoredBlock] = []
        for key in keys:
            block = self.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The keys whose blocks do not exist; keys whose state is unknown are left out."""
        return [key for key in keys if not self.contains(key)]

    def put_all(self, blocks: Iterable[StoredBlock]) -> int:
        """Store blocks that were missing; returns how many are stored now."""
        return sum(map(self.put, blocks))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        """The labels of blocks; None for a block that does not exist."""
        found = (self.get(key, used=False) for key in keys)
        return [None if block is None else Label.of(block) for block in found]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        """Remove abandoned writes and quarantined blocks older than `older_than` seconds, then
        blocks in order of last use, oldest first, until the rest fits `budget` bytes. Returns the
        bytes freed."""
        return 0

    def exists(self) -> bool:
        """Whether a store was ever created here."""
        return True

    def _checked(self, key: str, data: Any) -> StoredBlock | None:
        """Parse the bytes stored under a key. If they are not its block, quarantine them and return
        None."""
        try:
            return StoredBlock.from_bytes(
                data if isinstance(data, (bytes, bytearray)) else b"", key
            )
        except ValueError:
            self.quarantine(key)
        except MemoryError as error:
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def _label(self, key: str, data: bytes | None) -> Label | None:
        """The label in a block's first bytes; None without bytes."""
        if data is None:
            return None
        try:
            return Label.read(data, key)
        except ValueError:  # too few bytes, or a damaged block, which `get` will detect
            block = self.get(key, used=False)
            return None if block is None else Label.of(block)
