"""Backend: where blocks of tokens are kept beside the process, behind five calls."""

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
from kvkeep.store.layer_slices import Stretch

FORMAT = 2
"""The version of blocks that is written, and the only one that is read."""

LABEL_BYTES = 1 << 18
"""As many of a block's first bytes have its `Label`, if it has not thousands of planes."""

HEADER_BYTES = 1 << 19
"""The longest header of a block: thousands of planes."""

MOST_BYTES = 1 << 32
"""The largest block."""

_MOST_LAYERS = 1 << 12
_MOST_HEADS = _MOST_WIDTH = 1 << 20
_KEY = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{72,80}")

ABANDONED_S = 3600.0
"""After so long, what nobody knows of is not being written any more."""

_HEADER = "kvkeep_block"


class OtherBlockError(ValueError):
    """A block that is whole, under another key than its own, which is the argument."""


@dataclass(frozen=True)
class _Header:
    format: int
    identity: str
    prefix: str
    routed: bool | None
    likes: list[object]
    checksums: dict[str, str]


@contextmanager
def _no_block() -> Iterator[None]:
    """Raise ValueError for whatever is wrong with bytes that may be anything."""
    try:
        yield
    except MemoryError:  # which says nothing of the bytes
        raise
    except Exception as error:
        raise ValueError(f"no block of kvkeep: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Block:
    """Tokens that follow a known prefix, and what the layers hold of them.

    Args:
        identity: see `PrefixStore`.
        prefix: a hash of the tokens before it.
        tokens: its own, int64 (n,).
        routed: see `kvkeep.cache.Cache.routed`.
        geometries: of one row of each layer.
    """

    identity: str
    prefix: str
    tokens: Tensor
    stretch: Stretch
    routed: bool | None
    geometries: Sequence[Geometry]

    @property
    def key(self) -> str:
        """Where it is found: `identity/prefix/own`, hashes, the last after its first token."""
        return key_of(self.identity, self.prefix, self.tokens)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        found = {
            f"{index}.{name}": planes[name]
            for index, planes in enumerate(self.stretch.layers)
            for name in planes
        }
        return found | {"tokens": self.tokens}

    def metadata(self) -> dict[str, str]:
        """What is said of the tensors, with a checksum of each."""
        header = {
            "format": FORMAT,
            "identity": self.identity,
            "prefix": self.prefix,
            "routed": self.routed,
            "likes": [[*one[1:4], str(one.dtype)] for one in self.geometries],
            "checksums": {name: tensor_file.checksum(x) for name, x in self.tensors().items()},
        }
        return sealed(_HEADER, header)

    def to_bytes(self) -> bytes:
        """All of it, as bytes in the safetensors format."""
        return tensor_file.to_bytes(self.tensors(), self.metadata())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, key: str) -> Block:
        """The block of a key, of what `to_bytes` gave. It shares the memory of a bytearray.

        Raises:
            ValueError: it is not what was written.
            OtherBlockError: it is whole, and that of another key.
        """
        with _no_block():
            layout = Layout.read(data, HEADER_BYTES)
            if layout.nbytes != len(data):
                raise ValueError(f"{len(data)} bytes of {layout.nbytes}")
            own = data if isinstance(data, bytearray) else bytearray(data)
            tensors = {name: layout.tensor(name, own) for name in layout.entries}
            block = cls._read(tensors, layout.metadata)
        if block.key != key:
            raise OtherBlockError(block.key)
        return block

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Block:
        """A block, of what `tensors` and `metadata` gave. Raises anything."""
        header = _header(metadata)
        if set(tensors) != set(header.checksums):
            raise ValueError("its header and data differ")
        if len(header.likes) > _MOST_LAYERS:
            raise ValueError(f"{len(header.likes)} layers, but up to {_MOST_LAYERS} are read")
        geometries = [_geometry(fields) for fields in header.likes]
        numbers = {str(number): number for number in range(len(geometries))}
        layers: list[dict[str, Tensor]] = [{} for _ in geometries]
        for name, x in tensors.items():
            if tensor_file.checksum(x) != header.checksums[name]:
                raise ValueError(f"tensor {name} has another checksum")
            index, dot, plane = name.partition(".")
            if dot and index in numbers:
                layers[numbers[index]][plane] = x
            elif name != "tokens":
                raise ValueError(f"tensor {name[:50]!r} is of no layer")
        tokens = tensors["tokens"]
        if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
            raise ValueError(f"tokens {tuple(tokens.shape)} {tokens.dtype}")
        for geometry, planes in zip(geometries, layers, strict=True):
            for name, x in planes.items():
                if x.shape[:3] not in {(1, heads, len(tokens)) for heads in (1, geometry.heads)}:
                    raise ValueError(f"plane {name} is {tuple(x.shape)}")
        stretch = Stretch(layers, len(tokens))
        if not stretch.nbytes:
            raise ValueError("it holds nothing")
        return cls(header.identity, header.prefix, tokens, stretch, header.routed, geometries)


@dataclass(frozen=True)
class Label:
    """What a block says of itself, at a glance: its slots were not looked at.

    Args:
        identity, prefix, tokens: see `Block`.
        dtype: of the keys before they were encoded.
        nbytes: of all of it, as it is kept.
    """

    identity: str
    prefix: str
    tokens: Tensor
    layers: int
    dtype: str
    nbytes: int

    @property
    def key(self) -> str:
        """See `Block.key`."""
        return key_of(self.identity, self.prefix, self.tokens)

    @classmethod
    def of(cls, block: Block) -> Label:
        """That of a block."""
        kind = str(block.geometries[0].dtype)
        parts = (block.identity, block.prefix, block.tokens, len(block.geometries))
        return cls(*parts, kind, sum(x.nbytes for x in block.tensors().values()))

    @classmethod
    def read(cls, data: bytes, key: str | None = None) -> Label:
        """That of a block, of its first bytes.

        Args:
            key: of the block, if it is known.

        Raises:
            ValueError: it is not there, or these were too few.
        """
        with _no_block():
            layout = Layout.read(data, HEADER_BYTES)
            header = _header(layout.metadata)
            entry = layout.entries["tokens"]
            stop = layout.start + entry.stop
            if entry.dtype != torch.int64 or len(entry.shape) != 1 or stop > len(data):
                raise ValueError("its tokens lie elsewhere")
            tokens = layout.tensor("tokens", bytearray(data[:stop])).clone()
            kind = str(_geometry(header.likes[0]).dtype)
            parts = (header.identity, header.prefix, tokens, len(header.likes))
            label = cls(*parts, kind, layout.nbytes)
            if label.key != (key or label.key):
                raise ValueError("it is another block")
            return label


def _header(metadata: Mapping[str, str]) -> _Header:
    require_seal(_HEADER, metadata)
    header = typed(_Header, json.loads(metadata[_HEADER]))
    if header.format != FORMAT:
        raise ValueError(f"it is of format {header.format}, not {FORMAT}")
    return header


def _geometry(fields: Any) -> Geometry:
    heads, key_width, value_width, dtype = fields
    for number, most in (
        (heads, _MOST_HEADS),
        (key_width, _MOST_WIDTH),
        (value_width, _MOST_WIDTH),
    ):
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"a layer of {str(fields)[:80]}")
    return Geometry(1, heads, key_width, value_width, DTYPES[dtype])


def token_bytes(tokens: Tensor) -> bytes:
    """Tokens, int64 (n,), as they are hashed."""
    found: bytes = tokens.contiguous().numpy().tobytes()
    return found


def digest(tokens: Tensor) -> str:
    """A collision-resistant hash of tokens, int64 (n,)."""
    return hashlib.sha256(token_bytes(tokens)).hexdigest()


def beginning(identity: str, prefix: str, token: int) -> str:
    """How the keys of blocks begin that follow a prefix with some token."""
    own = hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()
    return f"{own}/{prefix}/{token:08x}"


def key_of(identity: str, prefix: str, tokens: Tensor) -> str:
    """The key of a block of tokens, (n,), that follow a prefix."""
    return beginning(identity, prefix, int(tokens[0])) + digest(tokens)


def is_key(key: object) -> bool:
    """Whether this is the key of a block."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def most_bytes() -> int:
    """The largest block that may be read now: what is larger would not fit the free memory."""
    free = free_bytes(torch.device("cpu"))
    return MOST_BYTES if free is None else min(MOST_BYTES, free)


def require_budget(budget: int | None) -> None:
    """Raise SpecError for a budget that nothing fits."""
    if budget is not None and budget < 1:
        raise SpecError(f"a store of {budget} bytes; give at least 1, or None")


class Backend(ABC):
    """Where blocks are kept. Several processes may share one; whatever goes wrong in it is a miss,
    never an error of whoever asked.

    The calls that are not abstract do what they say by the five others; a backend for which each
    call is a journey overrides them.
    """

    name: ClassVar[str]

    failures: int = 0
    """How often something went wrong, and what it was at last."""
    last_error: str = ""

    damaged: int = 0
    """How many blocks were found damaged, or others than they should be."""

    @abstractmethod
    def get(self, key: str, *, used: bool = True) -> Block | None:
        """A block that is whole, or None. It counts as used, unless it is only looked at."""

    @abstractmethod
    def put(self, block: Block) -> bool:
        """Keep a block, unless it is there; False where that failed."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether a block is there; `get` may still find it damaged."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget a block, if it is there."""

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin so."""

    def as_one_call(self) -> AbstractContextManager[None]:
        """While this is entered, all calls of this thread together take at most as long as one may;
        here a call has no limit."""
        return nullcontext()

    def quarantine(self, key: str) -> None:
        """Put aside a block that was found damaged, or other than it should be, so that it is never
        found again; here it is deleted."""
        self.damaged += 1
        self.delete(key)

    def leading(self, keys: Sequence[str]) -> list[Block]:
        """The blocks of the first keys, as far as they are there."""
        found: list[Block] = []
        for key in keys:
            block = self.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The keys whose blocks are not there; none where that is not known."""
        return [key for key in keys if not self.contains(key)]

    def put_all(self, blocks: Iterable[Block]) -> int:
        """Keep blocks that were missing; how many are there then."""
        return sum(map(self.put, blocks))

    def labels(self, keys: Sequence[str]) -> list[Label | None]:
        """What blocks say of themselves; None for those that are not there."""
        found = (self.get(key, used=False) for key in keys)
        return [None if block is None else Label.of(block) for block in found]

    def gc(self, older_than: float = ABANDONED_S, budget: int | None = None) -> int:
        """Remove what killed processes left and what was found damaged, if it is older than so many
        seconds; and blocks, those used longest ago first, until the rest fits a budget. The bytes
        of all that."""
        return 0

    def exists(self) -> bool:
        """Whether blocks were ever put here."""
        return True

    def _checked(self, key: str, data: Any) -> Block | None:
        """Parse the bytes stored under a key; None, and quarantined, if they are not its block."""
        try:
            return Block.from_bytes(data if isinstance(data, (bytes, bytearray)) else b"", key)
        except ValueError:
            self.quarantine(key)
        except MemoryError as error:
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def _label(self, key: str, data: bytes | None) -> Label | None:
        """That of a block's first bytes."""
        if data is None:
            return None
        try:
            return Label.read(data, key)
        except ValueError:  # they were too few, or damaged, as `get` will see
            block = self.get(key, used=False)
            return None if block is None else Label.of(block)
