"""Bulk: the tokens of a layer that are encoded a block at a time, once and for good."""

from __future__ import annotations

from copy import copy, deepcopy

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.codec import Codec
from kvkeep.errors import SpecError
from kvkeep.layer.frozen import Past
from kvkeep.planes import POSITION, Chain, Planes, joined, take
from kvkeep.storage import Storage


class Bulk:
    """Slots that hold `key_codec.block` tokens each.

    Args:
        key_codec, value_codec: of equal block.
        storage: where slots lie; owned from now on.

    Raises:
        SpecError: the storage has no room for a prompt that waits to be encoded.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec, storage: Storage) -> None:
        if storage.limited:
            raise SpecError(
                f"codecs {key_codec.name}/{value_codec.name} encode a prompt after it was attended "
                f"to, for which {storage.name} storage has no room; use @growing"
            )
        if not storage.lasting:
            raise SpecError(
                f"codecs {key_codec.name}/{value_codec.name} keep the newest tokens beside their "
                f"blocks, and of {storage.name} storage one at a time can be read; use int8, or "
                "@growing"
            )
        self.key_codec = key_codec
        self.value_codec = value_codec
        self.storage = storage
        self.block = key_codec.block
        self._frozen = Past()

    @property
    def length(self) -> int:
        """Tokens held."""
        return (self._frozen.length + self.storage.length) * self.block

    @property
    def capacity(self) -> int:
        """Tokens that fit what is allocated."""
        return (self._frozen.length + self.storage.capacity) * self.block

    @property
    def live_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self.shared_bytes + self.storage.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.shared_bytes + self.storage.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of frozen slots."""
        return self._frozen.shared_bytes

    def segments(self) -> list[Segment]:
        """Everything held, the oldest first."""
        return [Segment(run, self.key_codec, self.value_codec) for run in self._runs]

    def whole(self, tokens: int) -> int:
        """How many of `tokens` tokens are encoded when they have settled."""
        return whole(tokens, self.key_codec, self.value_codec)

    def take_oldest(self, tail: Storage) -> None:
        """Encode the oldest tokens of `tail`, as many as do not stay there."""
        planes, count = tail.read(), self.whole(tail.length)
        oldest = planes[POSITION].argsort(dim=2, stable=True)[:, :, :count]
        taken = take(planes, oldest)
        for name in ("k", "v"):
            taken[name] = filled(taken[name], taken[POSITION], self.block)
        keys, values = self.key_codec.encode(taken["k"]), self.value_codec.encode(taken["v"])
        encoded = joined(keys, "k") | joined(values, "v")
        encoded[POSITION] = taken[POSITION].reshape(*taken[POSITION].shape[:2], -1, self.block)
        self.storage.append(encoded)
        tail.evict(oldest)

    def read(self, rows: int) -> Planes:
        """Everything held, as one set of planes."""
        return Chain(self._runs, rows) if self._frozen.runs else self.storage.read()

    def load(self, planes: Planes) -> None:
        """Hold these slots instead."""
        self.reset()
        self.storage.append(planes)

    def take_rows(self, index: Tensor) -> None:
        """Make row i a copy of the former row index[i]."""
        self.storage.rows(index)
        self._frozen.take_rows(index)

    def freeze(self) -> None:
        """Make what is held immutable."""
        if self.storage.length:
            self._frozen.add(self.storage.read(), own=())
            self.storage = self.storage.another()

    def fork(self) -> Bulk:
        """The same slots, of which the frozen ones are shared."""
        other = copy(self)
        other.storage = deepcopy(self.storage)
        other._frozen = self._frozen.fork()
        return other

    def reset(self) -> None:
        """Free every slot."""
        self._frozen = Past()
        self.storage.reset()

    @property
    def _runs(self) -> list[Planes]:
        own = [self.storage.read()] if self.storage.length else []
        return [*(run.planes for run in self._frozen.runs), *own]


def whole(tokens: int, *codecs: Codec) -> int:
    """How many of `tokens` tokens codecs of equal block encode; the rest stays plain."""
    block, tail = codecs[0].block, max(codec.tail for codec in codecs)
    return max(0, tokens - tail) // block * block


def filled(x: Tensor, position: Tensor, block: int) -> Tensor:
    """Tokens (B, H, n, D) that are encoded `block` at a time, with those at position -1, (B, 1|H,
    n), like the last of their block: they are nobody's, and must not widen its range."""
    blocks = x.reshape(*x.shape[:2], -1, block, x.shape[3])
    empty = position.reshape(*position.shape[:2], -1, block, 1) < 0
    return torch.where(empty, blocks[:, :, :, -1:], blocks).flatten(2, 3)
