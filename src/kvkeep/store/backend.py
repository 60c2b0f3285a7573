"""Backend: where blocks of tokens are kept beside the process, behind five calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import xxhash
from torch import Tensor

from kvkeep import tensorfile
from kvkeep.planes import Planes
from kvkeep.store.stretch import Stretch

FORMAT = 1
"""The version of blocks that is written, and the only one that is read."""

_HEADER, _CHECKSUM = "kvkeep_block", "kvkeep_checksum"


@dataclass(frozen=True)
class Block:
    """Tokens that follow a known prefix, and what the layers hold of them.

    Args:
        identity: see `PrefixStore`.
        prefix: a hash of the tokens before it.
        tokens: its own, int64 (n,).
        routed: see `kvkeep.cache.Cache.routed`.
        likes: of each layer, no keys and no values, (1, H, 0, D).
    """

    identity: str
    prefix: str
    tokens: Tensor
    stretch: Stretch
    routed: bool | None
    likes: Sequence[tuple[Tensor, Tensor]]

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
        text = json.dumps(
            {
                "format": FORMAT,
                "identity": self.identity,
                "prefix": self.prefix,
                "routed": self.routed,
                "likes": [
                    [k.shape[1], k.shape[3], v.shape[3], str(k.dtype)] for k, v in self.likes
                ],
                "checksums": {name: tensorfile.checksum(x) for name, x in self.tensors().items()},
            }
        )
        return {_HEADER: text, _CHECKSUM: xxhash.xxh3_128_hexdigest(text.encode())}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Block:
        """A block, of what `tensors` and `metadata` gave.

        Raises:
            ValueError: it is not what was written.
        """
        text = metadata.get(_HEADER, "")
        if metadata.get(_CHECKSUM) != xxhash.xxh3_128_hexdigest(text.encode()):
            raise ValueError("its header has another checksum")
        header: dict[str, Any] = json.loads(text)
        if header["format"] != FORMAT:
            raise ValueError(f"it is of format {header['format']}, not {FORMAT}")
        if set(tensors) != set(header["checksums"]):
            raise ValueError("its header and data differ")
        for name, x in tensors.items():
            if tensorfile.checksum(x) != header["checksums"][name]:
                raise ValueError(f"tensor {name} has another checksum")
        likes = []
        for heads, key_width, value_width, dtype in header["likes"]:
            kind = _DTYPES[dtype]
            likes.append(
                (
                    torch.empty(1, heads, 0, key_width, dtype=kind),
                    torch.empty(1, heads, 0, value_width, dtype=kind),
                )
            )
        layers: list[Planes] = [
            {
                name.partition(".")[2]: x
                for name, x in tensors.items()
                if name.partition(".")[0] == str(index)
            }
            for index in range(len(likes))
        ]
        tokens = tensors["tokens"]
        if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
            raise ValueError(f"tokens {tuple(tokens.shape)} {tokens.dtype}")
        for (k, _), planes in zip(likes, layers, strict=True):
            for name, x in planes.items():
                if x.shape[:3] not in {(1, heads, len(tokens)) for heads in (1, k.shape[1])}:
                    raise ValueError(f"plane {name} is {tuple(x.shape)}")
        stretch = Stretch(layers, len(tokens))
        return cls(header["identity"], header["prefix"], tokens, stretch, header["routed"], likes)


_DTYPES = {str(t): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


def digest(tokens: Tensor) -> str:
    """A hash of tokens, int64 (n,)."""
    return xxhash.xxh3_128_hexdigest(tokens.contiguous().numpy().tobytes())


def beginning(identity: str, prefix: str, token: int) -> str:
    """How the keys of blocks begin that follow a prefix with some token."""
    return f"{xxhash.xxh3_128_hexdigest(identity.encode())}/{prefix}/{token:08x}"


def key_of(identity: str, prefix: str, tokens: Tensor) -> str:
    """The key of a block of tokens, (n,), that follow a prefix."""
    return beginning(identity, prefix, int(tokens[0])) + digest(tokens)


class Backend(ABC):
    """Where blocks are kept. Several processes may share one; whatever goes wrong in it is a miss,
    never an error of whoever asked."""

    name: ClassVar[str]

    @abstractmethod
    def get(self, key: str) -> Block | None:
        """A block that is whole, or None. It counts as used."""

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


@final
class Memory(Backend):
    """In a dict of this process: for tests, and as the shortest example of a backend."""

    name: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}

    def get(self, key: str) -> Block | None:
        return self._blocks.get(key)

    def put(self, block: Block) -> bool:
        self._blocks.setdefault(block.key, block)
        return True

    def contains(self, key: str) -> bool:
        return key in self._blocks

    def delete(self, key: str) -> None:
        self._blocks.pop(key, None)

    def scan(self, prefix: str = "") -> Iterator[str]:
        return iter([key for key in self._blocks if key.startswith(prefix)])
