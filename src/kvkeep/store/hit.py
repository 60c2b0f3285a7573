"""Hit: what a store found, and how a cache comes to hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.chunk import empty_like
from kvkeep.errors import StateError
from kvkeep.figures import slot_planes
from kvkeep.frozen import Run
from kvkeep.layer import LayerCache
from kvkeep.ledger import LayerState, Ledger
from kvkeep.store.backend import Block
from kvkeep.store.stretch import Stretch, stretch_of
from kvkeep.store.tree import Match, Node


@dataclass(frozen=True)
class Shape:
    """What all entries of one identity have in common: each layer's heads, widths, dtype and
    device, how the tokens were fed, and the bytes of one."""

    described: tuple[str, ...]
    routed: bool | None
    token_bytes: int
    like: Sequence[tuple[Tensor, Tensor]] = field(compare=False, repr=False)

    @classmethod
    def of(
        cls, stretch: Stretch, routed: bool | None, like: Sequence[tuple[Tensor, Tensor]]
    ) -> Shape:
        """That of tokens whose layers hold this."""
        described = tuple(
            f"{k.shape[1]} heads of {k.shape[3]}/{v.shape[3]}, {k.dtype} on {k.device}"
            for k, v in like
        )
        return cls(described, routed, stretch.nbytes // len(stretch), like)

    @classmethod
    def of_block(cls, block: Block) -> Shape:
        """That of a backend's block."""
        return cls.of(block.stretch, block.routed, block.likes)


def shape_of(states: Sequence[LayerState], routed: bool | None) -> Shape:
    """That of what the layers of a cache hold."""
    likes = [state.ledger.like for state in states]
    like = [(empty_like(k[:1]), empty_like(v[:1])) for k, v in filter(None, likes)]
    return Shape.of(stretch_of(states, 0, 1), routed, like)


class Hit:
    """What a store has of a prompt's beginning. It stays there until the hit is released: call
    `release`, or use it in a `with` statement.

    `length` is how many tokens it has, 0 for none.
    """

    def __init__(
        self, match: Match[Stretch], shape: Shape | None, release: Callable[[Node[Stretch]], None]
    ) -> None:
        self.length = match.length if shape is not None else 0
        self._shape, self._release = shape, release
        self._node: Node[Stretch] | None = match.node
        self._stretches = _stretches(match)

    def fits(self, cache: Cache) -> bool:
        """Whether the layers of a cache can hold it: their codecs encode as those it is of."""
        if self._shape is None or not self.length:
            return False
        return len(cache.layers) == len(self._shape.like) and all(
            {name: (x.shape[3:], x.dtype) for name, x in stretch.layers[index].items()} == specs
            for index, specs in enumerate(map(_plane_specs, cache.layers, self._shape.like))
            for stretch in self._stretches
        )

    def fill(self, cache: Cache) -> None:
        """Let an empty cache hold it, without copying. It goes on by itself, and stays whole when
        the store evicts this entry.

        Raises:
            StateError: the cache holds something, or its specs are others.
        """
        if cache.fed:
            raise StateError(f"this cache holds {cache.fed} tokens; reset() it, or give a new one")
        if not self.length or self._shape is None:
            return
        if not self.fits(cache):
            raise StateError(
                f"a hit of {len(self._shape.like)} layers of {self._shape.described[0]} for a "
                f"cache of {len(cache.layers)} layers, {cache.layers[0].kind}; give the specs it "
                "was stored with"
            )
        for index, (layer, like) in enumerate(zip(cache.layers, self._shape.like, strict=True)):
            ledger = Ledger()
            ledger.columns, ledger.like = self.length, like
            layer.adopt(ledger, frozen=[Run.of(one.layers[index]) for one in self._stretches])
        cache.routed = self._shape.routed

    def release(self) -> None:
        """Let the store evict it again."""
        if self._node is not None:
            self._release(self._node)
            self._node = None

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _plane_specs(
    layer: LayerCache, like: tuple[Tensor, Tensor]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and type of what a slot of a layer holds, for keys and values like these."""
    (k, v), codecs = like, (layer.key_codec, layer.value_codec)
    found = slot_planes(layer.policy, *codecs, k.shape[3], v.shape[3], k.dtype)
    return {name: (spec.shape, spec.dtype) for name, spec in found.items()}


def _stretches(match: Match[Stretch]) -> list[Stretch]:
    """What a match has, in the order of its tokens; nothing is copied."""
    found, left = [], match.length
    for node in match.node.path():
        found.append(node.kept if left >= len(node.tokens) else node.kept.head(left))
        left -= len(node.tokens)
    return found
