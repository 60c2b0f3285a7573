"""A layer's slots with gradients: chunks are pushed forward and popped backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.attention import Held
from kvkeep.codec import encoded_count
from kvkeep.files.offload import Kept, Offload
from kvkeep.layer.block_encoded import filled, order_of_encoding
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import along_slots
from kvkeep.policy.replay import among


class _Undo(NamedTuple):
    """How to undo a push of `tokens` tokens.

    `order`: each slot's previous index, int32 (B, 1|H, S), evicted slots last; None: no slot moved.
    `position`: positions in the previous order. `gone`: keys and values of evicted slots.
    `encoded`: plain keys and values of the slots that the push encoded.
    """

    tokens: int
    order: Kept | None = None
    position: Kept | None = None
    gone: tuple[Kept, ...] = ()
    encoded: tuple[Kept, ...] = ()


class Slots:
    """A layer's slots between chunks, in one buffer, with a gradient buffer of the same shape.

    In the forward, `push` writes a chunk's tokens and evicts slots, whose keys and values go to
    `store`. In the backward, `pop` undoes the push: evicted slots come back with zero gradients,
    and `pop` returns the gradients of the chunk's tokens.

    Args:
        held: the initial slots, changed in place; None: no slots.
        encoded: number of slots that are already encoded in blocks.
    """

    def __init__(
        self, store: Offload, layer: LayerCache, held: Held | None = None, encoded: int = 0
    ) -> None:
        self.length = 0 if held is None else held.keys.shape[2]
        self.encoded = encoded
        self._store, self._layer = store, layer
        # Keys, values, positions; then gradients of keys and values.
        self._buffers: list[Tensor] = [] if held is None else [*held[:3]]
        self._undo: list[_Undo] = []

    @property
    def past(self) -> Held:
        """The current slots: views, valid until the next change."""
        keys, values, position = (x[:, :, : self.length] for x in self._buffers[:3])
        return Held(keys, values, position)

    def push(self, k: Tensor, v: Tensor, position: Tensor, evicted: list[Tensor]) -> None:
        """Write n tokens, evict, then encode full blocks.

        Args:
            k, v: (B, H, n, Dk) and (B, H, n, Dv), in the precision of slots.
            position: (n,) or (B, n).
            evicted: positions to evict, int32 (B, 1|H, c) each.
        """
        rows, heads, n, _ = k.shape
        place = position.reshape(-1, 1, n).to(torch.int32)
        place = place.expand(rows, heads if self._layer.policy.per_head else 1, n)
        self._reserve(self.length + n, (k, v, place))
        for buffer, new in zip(self._buffers, (k, v, place), strict=False):
            buffer[:, :, self.length : self.length + n] = new
        self.length += n
        self._evict(_Undo(n), evicted)
        if self._undo[-1].order is None and self._layer.key_codec.block > 1:
            self._undo.append(self._encode(self._undo.pop()))

    def evict(self, evicted: list[Tensor]) -> None:
        """Evict as `push` does, without new tokens."""
        self._evict(_Undo(0), evicted)

    def _evict(self, undo: _Undo, evicted: list[Tensor]) -> None:
        place = self.past.position
        gone = torch.zeros_like(place, dtype=torch.bool)
        for chosen in evicted:
            gone |= among(place, chosen.to(place.device))
        if gone.any():
            order = gone.to(torch.uint8).argsort(dim=2, stable=True)
            undo = self._move(undo, order, int((~gone).sum(dim=2).amax()), gone)
        self._undo.append(undo)

    def absorb(self, *gradients: Tensor | None) -> None:
        """Add gradients (B, H, S, D) of the current keys and values."""
        if len(self._buffers) == 3:
            self._buffers += [
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                for x in self._buffers[:2]
            ]
        for buffer, gradient in zip(self._buffers[3:], gradients, strict=True):
            if gradient is not None:
                buffer[:, :, : self.length] += gradient

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the current keys and values, (B, H, S, D)."""
        self.absorb(None, None)
        keys, values = (x[:, :, : self.length] for x in self._buffers[3:])
        return keys, values

    def pop(self) -> tuple[Tensor, ...]:
        """Undo the last push; return the gradients of its keys and values, (B, H, n, D) each."""
        undo = self._undo.pop()
        if undo.encoded:
            plain = [self._store.take(kept) for kept in undo.encoded]
            own = slice(self.encoded - plain[0].shape[2], self.encoded)
            for buffer, x in zip(self._buffers, plain, strict=False):
                buffer[:, :, own] = x
            self.encoded = own.start
        if undo.order is not None:
            self._move_back(undo)
        own = slice(self.length - undo.tokens, self.length)
        self.length -= undo.tokens
        return tuple(buffer[:, :, own].clone() for buffer in self._buffers[3:])

    def _move(self, undo: _Undo, order: Tensor, held: int, gone: Tensor | None = None) -> _Undo:
        """Reorder the slots and keep the first `held` slots; return how to undo this."""
        before, kept = self.past.position.clone(), []
        for buffer in self._buffers[:2]:
            moved = buffer.gather(2, along_slots(order, buffer))
            buffer[:, :, :held] = moved[:, :, :held]
            kept.append(self._store.put(moved[:, :, held:]))
        place = before if gone is None else before.masked_fill(gone, -1)
        self._buffers[2][:, :, :held] = place.gather(2, order)[:, :, :held]
        self.length = held
        waiting = self._store.put(order.to(torch.int32)), self._store.put(before)
        return undo._replace(order=waiting[0], position=waiting[1], gone=tuple(kept))

    def _move_back(self, undo: _Undo) -> None:
        assert undo.order is not None
        assert undo.position is not None
        order = self._store.take(undo.order).long()
        held, length = self.length, order.shape[2]
        tails = [self._store.take(kept) for kept in undo.gone]
        for index, buffer in enumerate([*self._buffers[:2], *self._buffers[3:]]):
            shape = (*buffer.shape[:2], length - held, buffer.shape[3])
            tail = tails[index] if index < 2 else buffer.new_zeros(shape)
            moved = torch.cat([buffer[:, :, :held], tail], dim=2)
            back = torch.empty_like(moved).scatter_(2, along_slots(order, moved), moved)
            buffer[:, :, :length] = back
        self._buffers[2][:, :, :length] = self._store.take(undo.position)
        self.length = length

    def _encode(self, undo: _Undo) -> _Undo:
        """Encode the oldest plain tokens, as `BlockEncoded` does."""
        codecs = self._layer.key_codec, self._layer.value_codec
        count = encoded_count(self.length - self.encoded, *codecs)
        if not count:
            return undo
        place = self.past.position.clone()
        place[:, :, : self.encoded] = torch.iinfo(place.dtype).min  # encoded tokens stay in place
        undo = self._move(undo, order_of_encoding(place, *codecs), self.length)
        kept = []
        for buffer, codec in zip(self._buffers, codecs, strict=False):
            plain = buffer[:, :, self.encoded : self.encoded + count]
            at = self.past.position[:, :, self.encoded : self.encoded + count]
            kept.append(self._store.put(plain.clone()))  # a copy: the slots are overwritten below
            plain.copy_(codec.decode(codec.encode(filled(plain, at, codec.block)), plain.dtype))
        self.encoded += count
        return undo._replace(encoded=tuple(kept))

    def _reserve(self, slots: int, like: tuple[Tensor, ...]) -> None:
        """Make room for `slots` slots; the first `length` slots keep their contents."""
        if self._buffers and slots <= self._buffers[0].shape[2]:
            return
        capacity = max(slots, 2 * self.length)
        grown = [x.new_zeros(*x.shape[:2], capacity, *x.shape[3:]) for x in like]
        for new, old in zip(grown, self._buffers, strict=False):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers = grown
