"""How the Triton kernels cut a call into programs."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

_TILES_BYTES = 96 << 10  # of the smallest shared memory of a server, so that more programs fit
_MOST_STAGES = 3
_FEWEST_TILES = 4
_MOST_SPLITS = 128
_SMALL_SHARED = 150 << 10


def power_of_two(x: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, x - 1).bit_length()


def stages(block: int, k: Tensor, v: Tensor) -> int:
    """Tiles of `block` slots under way at once, as far as they fit a processor's shared memory."""
    tile = block * sum(x.shape[3] * x.element_size() for x in (k, v))
    return max(2, min(_MOST_STAGES, _TILES_BYTES // max(1, tile)))


@lru_cache(maxsize=4096)
def splits(pairs: int, tiles: int, at_once: int) -> int:
    """Splits that keep all processors equally busy, each with a few tiles at least.

    Programs run in waves of `at_once`; the time is that of the waves, and each program's own start.
    """
    most = max(1, min(tiles // _FEWEST_TILES, -(-4 * at_once // pairs), _MOST_SPLITS))

    def time(count: int) -> float:
        waves = -(-pairs * count // at_once)
        return waves * (-(-tiles // count) + 1)

    return min(range(1, most + 1), key=lambda count: (time(count), count))


@cache
def small(device: torch.device) -> bool:
    """Whether a program may have only 100 KB of shared memory, as on GPUs for desktops."""
    if device.type != "cuda":
        return False
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", _SMALL_SHARED)) < _SMALL_SHARED


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors there are."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
