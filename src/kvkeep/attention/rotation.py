"""Rotary offsets: attention to keys at shifted positions, by rotating the queries instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvkeep.rotary import Rotary


@dataclass(frozen=True)
class Rotation:
    """The offset between the positions for which a segment's keys were rotated and the positions at
    which they are used.

    q . R(d)k = (R(-d)q) . k, so queries rotated by `turn` attend to the keys as if the keys were
    rotated for positions `offset` later.

    Args:
        offset: d, in positions: position of use minus position of rotation; may be negative.
        inv_freq: (R/2,) angular frequencies of the model's rotary embedding; see `Rotary`.
        interleaved, first, beside: the rotated dimensions; see `Rotary`.
    """

    offset: int
    inv_freq: Tensor
    interleaved: bool = False
    first: int = 0
    beside: Rotary | None = None

    @property
    def turns(self) -> bool:
        """Whether any dimension is rotated."""
        return Rotary(self.inv_freq, beside=self.beside).turns

    def turn(self, q: Tensor) -> Tensor:
        """R(-offset) applied to q (..., D), computed in at least float32; a copy."""
        return self._turned(q, -self.offset)

    def turned_keys(self, k: Tensor) -> Tensor:
        """R(offset) applied to k (..., D): keys rotated for their positions of use; a copy."""
        return self._turned(k, self.offset)

    def _turned(self, x: Tensor, by: int) -> Tensor:
        frequencies = _there(self.inv_freq, x.device)
        distance = torch.full(
            (), by, dtype=torch.int64, device=x.device
        )  # created on the device, not copied to it
        rotary = Rotary(frequencies, self.interleaved, self.first, self.beside)
        return rotary.turn(x, distance)


_moved = WeakTensorKeyDictionary()  # frequencies -> their copies by device


def _there(inv_freq: Tensor, device: torch.device) -> Tensor:
    """Frequencies on a device, copied once: otherwise each step would wait for the copy."""
    if inv_freq.device == device:
        return inv_freq
    if inv_freq not in _moved:
        _moved[inv_freq] = {}
    known: dict[torch.device, Tensor] = _moved[inv_freq]
    if device not in known:
        with torch.inference_mode(False):
            known[device] = inv_freq.to(device)
    return known[device]
