"""Offloading of tensors to host memory and, beyond a limit, to a file."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kvkeep.errors import StateError
from kvkeep.reading import read_into
from kvkeep.storage.allocate import available_host_bytes


class Spilled(NamedTuple):
    """A tensor in the spill file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Kept(NamedTuple):
    """An offloaded tensor and its original device."""

    place: Tensor | Spilled
    device: torch.device


class Offload:
    """Keeps tensors in host memory or in a file until they are needed.

    Args:
        host_bytes: most bytes in host memory; further tensors go to a file. None: half of the
            memory available now.
        directory: directory of the unnamed file; None: the system's directory for temporary files.

    Raises:
        MissingPackageError: no limit is given, the system is not Linux, and psutil is missing.
    """

    def __init__(
        self, host_bytes: int | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self.host_limit = available_host_bytes() // 2 if host_bytes is None else host_bytes
        self.host_bytes = self.file_bytes = self.peak_bytes = 0
        self._directory = directory
        self._file: Any = None
        # Offsets of free gaps in the file, by length of the gap.
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = 0

    def put(self, x: Tensor) -> Kept:
        """Offload a tensor. A contiguous tensor in host memory that is not a view is kept without a
        copy: the caller must not write to it.

        Raises:
            StateError: the disk is full.
        """
        x, count = x.detach(), x.numel() * x.element_size()
        if self.host_bytes + count > self.host_limit:
            place: Tensor | Spilled = self._write(x.contiguous().cpu())
            self.file_bytes += count
        else:
            whole = x.untyped_storage().nbytes() == count and x.is_contiguous()
            place = (
                x.cpu() if whole or not x.is_cpu else x.clone(memory_format=torch.contiguous_format)
            )
            self.host_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.host_bytes + self.file_bytes)
        return Kept(place, x.device)

    def get(self, kept: Kept) -> Tensor:
        """Return the tensor on its original device; the caller must not write to it."""
        place = kept.place
        return (self._read(place) if isinstance(place, Spilled) else place).to(kept.device)

    def drop(self, kept: Kept) -> None:
        """Free a tensor's space."""
        place, count = kept.place, kept.place.nbytes
        if isinstance(place, Spilled):
            self._free[count].append(place.offset)
            self.file_bytes -= count
        else:
            self.host_bytes -= count

    def retain(self, kept: Iterable[Kept]) -> None:
        """After an interrupted `put` or `drop`: free all tensors except `kept`."""
        places = [one.place for one in kept]
        spilled = sorted((x for x in places if isinstance(x, Spilled)), key=lambda x: x.offset)
        gaps, end = defaultdict[int, list[int]](list), 0
        for place in spilled:
            if place.offset > end:
                gaps[place.offset - end].append(end)
            end = place.offset + place.nbytes
        self._free, self._end = gaps, end
        self.file_bytes = sum(place.nbytes for place in spilled)
        self.host_bytes = sum(x.nbytes for x in places if not isinstance(x, Spilled))

    def take(self, kept: Kept) -> Tensor:
        """`get` and `drop`."""
        x = self.get(kept)
        self.drop(kept)
        return x

    def put_tree(self, tree: Any, known: dict[int, Kept]) -> Any:
        """Offload the floating-point tensors in nested tuples, lists and dicts. `known` maps the
        ids of tensors already offloaded to their entries, so that each tensor is kept once."""

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = self.put(leaf)
            return known[id(leaf)]

        return tree_map(keep, tree)

    def get_tree(self, tree: Any) -> Any:
        """The inverse of `put_tree`."""
        return tree_map(
            lambda leaf: self.get(leaf) if isinstance(leaf, Kept) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, Kept),
        )

    def close(self) -> None:
        """Free the file and reset everything except `peak_bytes`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._free.clear()
        self._end = self.host_bytes = self.file_bytes = 0

    def _write(self, x: Tensor) -> Spilled:
        count = x.numel() * x.element_size()
        gaps = self._free[count]
        offset = gaps.pop() if gaps else self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            data, done = _bytes(x), 0
            while done < count:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        except OSError as error:
            where = self._directory or tempfile.gettempdir()
            raise StateError(
                f"{where} has no room for {count} bytes of layer inputs after {self.file_bytes}: "
                f"{error}; give another spill directory, more host_bytes or a shorter text"
            ) from error
        self._end = max(self._end, offset + count)
        return Spilled(offset, x.shape, x.dtype)

    def _read(self, place: Spilled) -> Tensor:
        x = torch.empty(place.shape, dtype=place.dtype)
        read_into(self._file.fileno(), _bytes(x), place.offset)
        return x


def _bytes(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data
