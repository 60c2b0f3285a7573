"""Divides a call of the Triton kernels into programs."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

_TILES_BYTES = 96 << 10  # shared memory per program, so that several programs fit a multiprocessor
_MOST_STAGES = 3
_FEWEST_TILES = 4
_MOST_SPLITS = 128
_SMALL_SHARED = 150 << 10


def power_of_two(x: int) -> int:
    """The smallest power of two >= x."""
    return 1 << max(0, x - 1).bit_length()


def stages(block: int, k: Tensor, v: Tensor) -> int:
    """Number of tiles of `block` slots that are loaded at once, limited by the shared memory."""
    tile = block * sum(x.shape[3] * x.element_size() for x in (k, v))
    return max(2, min(_MOST_STAGES, _TILES_BYTES // max(1, tile)))


@lru_cache(maxsize=4096)
def splits(pairs: int, tiles: int, at_once: int) -> int:
    """The number of splits that keeps all multiprocessors busy, with a few tiles in each.

    Programs run in waves of `at_once`. The modelled time is the time of the waves, plus one tile's
    time to start each program.
    """
    most = max(1, min(tiles // _FEWEST_TILES, -(-4 * at_once // pairs), _MOST_SPLITS))

    def time(count: int) -> float:
        waves = -(-pairs * count // at_once)
        return waves * (-(-tiles // count) + 1)

    return min(range(1, most + 1), key=lambda count: (time(count), count))


@cache
def small(device: torch.device) -> bool:
    """Whether a program has only about 100 KB of shared memory, as on desktop GPUs."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _SMALL_SHARED)) < _SMALL_SHARED


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a device."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
