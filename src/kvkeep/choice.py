"""Which calls torch computes faster than the native library, on this processor.

The table of an instruction set lists, for each operation and dtype, the sizes for which torch is
faster; the native library computes all other calls. `kvkeep doctor --measure` measures a table for
this machine and stores it in kvkeep's directory. Without one, `defaults` apply.
"""

from __future__ import annotations

import json
import platform
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

import torch

from kvkeep import native_library
from kvkeep.errors import MissingPackageError
from kvkeep.home import home
from kvkeep.reading import read_file
from kvkeep.version import __version__

Range = tuple[int, int | None]
"""The smallest and the largest number; None: no limit."""

Box = tuple[Range, ...]
"""A range for each number that describes a call's size."""

Table = dict[str, dict[str, list[Box]]]
"""Operation -> dtype -> the sizes for which torch is faster."""

SIZES = {
    "attention": ("tokens", "slots", "group", "width"),
    "linears": ("rows", "bytes"),
    "int8 linears": ("rows", "bytes"),
}
"""The numbers that describe the size of an operation's call: tokens of the chunk, slots, query
heads per kv head, and width of a head; rows of x and bytes of the weights. The dtype is that of
queries and of x."""

_ANY: Range = (0, None)
# For so small weights the call itself takes most of the time.
_SMALL: list[Box] = [((1, 1), (0, (1 << 18) - 1)), (_ANY, (0, (1 << 16) - 1))]
_SMALL_CODES: list[Box] = [(_ANY, (0, (1 << 14) - 1))]
_MANY: Box = ((33, None), _ANY)  # of more rows than 32, the kernel reads the weights again


def defaults(instructions: str) -> Table:
    """The table of an instruction set as long as nothing is measured. The kernel also computes many
    rows where torch has no fast product of the dtype."""
    compiled_for_any = instructions in ("", "portable")
    many = {
        name_of(dtype): [] if is_slow(dtype) and not compiled_for_any else [_MANY]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    return {
        "attention": {kind: [] for kind in many},
        "linears": {kind: [*_SMALL, *boxes] for kind, boxes in many.items()},
        "int8 linears": {kind: [*_SMALL_CODES, *boxes] for kind, boxes in many.items()},
    }


_MOST_BYTES = 1 << 20  # of a file of measured tables


def torch_is_faster(operation: str, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch computes a call faster than the native library.

    Args:
        operation: a key of `SIZES`, which names the `sizes`. Give tokens, rows and slots as
            `rounded` returns them.
    """
    return _found(native_library.instructions(), operation, dtype, sizes)


def kernel_rows(dtype: torch.dtype, weights: int, *, coded: bool = False) -> tuple[bool, ...]:
    """For linear layers of at most 1, 2, 4, ... rows of x, whether the kernel is faster than torch.

    Args:
        dtype: the dtype of x.
        weights: bytes of the weights.
        coded: whether the weights are int8 codes.
    """
    operation = "int8 linears" if coded else "linears"
    return _kernel_rows(native_library.instructions(), operation, dtype, weights)


@lru_cache(maxsize=1024)
def _kernel_rows(
    instructions: str, operation: str, dtype: torch.dtype, weights: int
) -> tuple[bool, ...]:
    sizes = [(1 << index, weights) for index in range(64)]
    return tuple(not _found(instructions, operation, dtype, size) for size in sizes)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether torch lacks a fast product of a dtype on the CPU.

    torch multiplies bfloat16 and float16 by oneDNN where the processor has instructions for the
    dtype (AVX-512; AVX512_FP16). Elsewhere products of these types take five times as long as in
    float32, products with transposed matrices and depthwise convolutions up to fifty times.
    """
    return dtype in _SLOW


def _lacks(question: str) -> bool:
    supported = getattr(torch.ops.mkldnn, question, None)
    return supported is not None and not supported()


# Asked once, because torch's compiler cannot trace the questions.
_SLOW = [
    dtype
    for dtype, question in (
        (torch.bfloat16, "_is_mkldnn_bf16_supported"),
        (torch.float16, "_is_mkldnn_fp16_supported"),
    )
    if _lacks(question)
]


def rounded(x: int) -> int:
    """The smallest power of two >= x, for x > 0: a size that is measured."""
    return 1 << (x - 1).bit_length()


@lru_cache(maxsize=4096)
def _found(instructions: str, operation: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    boxes = table(instructions)[operation].get(name_of(dtype), ())
    return any(all(map(_within, sizes, box)) for box in boxes)


def _within(x: int, bounds: Range) -> bool:
    low, high = bounds
    return low <= x and (high is None or x <= high)


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name in tables."""
    return str(dtype).removeprefix("torch.")


@cache
def table(instructions: str) -> Table:
    """The table in use for an instruction set: the measured one of this machine, or
    `defaults`. A file that cannot be used is ignored with a warning."""
    measured: Table = {}
    try:
        measured = measured_tables(measured_file()).get(machine(instructions), {})
    except MissingPackageError:  # there is no directory, so nothing was measured
        pass
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{measured_file()} is ignored: {error}; delete it, then run kvkeep doctor --measure",
            stacklevel=2,
        )
    usual = defaults(instructions)
    return {operation: usual[operation] | measured.get(operation, {}) for operation in SIZES}


def forget() -> None:
    """Read the measured tables again, after they have changed."""
    for cached in (table, _found, _kernel_rows):
        cached.cache_clear()


def is_measured(instructions: str) -> bool:
    """Whether the table in use for an instruction set was measured."""
    return table(instructions) != defaults(instructions)


def machine(instructions: str) -> str:
    """The processor, the instruction set and the versions for which a measured table holds."""
    versions = f"kvkeep {__version__}, torch {torch.__version__}"
    return f"{processor()}, {instructions or 'no native library'}, {versions}"


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        with info.open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measured_file() -> Path:
    """Where measured tables are stored.

    Raises:
        MissingPackageError: as for `home`.
    """
    return home() / "measured.json"


def measured_tables(path: Path) -> dict[str, Table]:
    """The measured tables in a file, by `machine`; none if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has other contents.
    """
    try:
        found = json.loads(read_file(path, _MOST_BYTES))
        return {
            name: {
                operation: {
                    kind: [_box(box, len(SIZES[operation])) for box in boxes]
                    for kind, boxes in kinds.items()
                }
                for operation, kinds in table.items()
            }
            for name, table in found.items()
        }
    except FileNotFoundError:
        return {}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it is no table of measurements ({error})") from error


def _box(ranges: list[list[int | None]], count: int) -> Box:
    box = tuple((low, high) for low, high in ranges)
    kinds = {type(x) for low, high in box for x in (low, high or 0)}
    if len(box) != count or kinds != {int}:
        raise ValueError(f"a size is {ranges}; it has {count} ranges of whole numbers")
    return cast(Box, box)
