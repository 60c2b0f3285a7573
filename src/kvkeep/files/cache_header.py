"""The header of a saved cache, and the bounds on values read from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import SavedCacheError
from kvkeep.files.headers import require_seal, typed

FORMAT = 1
"""Version of the file format: the version written, and the newest that can be read."""

HEADER = "kvkeep"
"""Key of the header in a file's metadata."""

_MOST_LAYERS = 1 << 12
_MOST = {"rows": 1 << 20, "heads": 1 << 20, "key_width": 1 << 20, "value_width": 1 << 20}
MOST_TOKENS = 1 << 31
"""Upper bounds of numbers in a header."""


@dataclass(frozen=True)
class LayerHeader:
    """The state and geometry of one layer; see `kvkeep.layer.history.History`. Its `joined` is
    saved as `apart`; its `pads` and `offset` are saved as tensors."""

    kind: str
    columns: int
    floor: int
    rows: int
    heads: int
    key_width: int
    value_width: int
    dtype: str
    apart: bool = False
    embedded: bool = False


@dataclass(frozen=True)
class Header:
    """The header of a saved cache.

    Args:
        specs: spec of each layer, as text.
        capacity: slots of fixed storage, or None.
        fingerprint: everything that the keys and values depend on, by name.
        routed: see `kvkeep.cache.Cache.routed`.
        notes: the caller's own text, by name.
        checksums: XXH3 checksum of each tensor's bytes, by tensor name.
    """

    format: int
    version: str
    specs: list[str]
    capacity: int | None
    fingerprint: dict[str, str]
    routed: bool | None
    notes: dict[str, str]
    layers: list[LayerHeader]
    checksums: dict[str, str]


def header_of(metadata: Mapping[str, str], path: Path) -> Header:
    """Read the header from a file's metadata.

    Raises:
        SavedCacheError: the header is malformed, of a newer version, or has values out of bounds.
    """
    try:
        require_seal(HEADER, metadata)
    except ValueError as error:
        raise SavedCacheError(f"{path} is damaged: {error}; save it again") from error
    try:
        fields: dict[str, Any] = json.loads(metadata[HEADER])
        if fields["format"] != FORMAT:
            raise SavedCacheError(
                f"{path} has format {fields['format']}, this kvkeep reads {FORMAT}; install "
                f"kvkeep {fields.get('version')} or newer"
            )
        header = typed(
            Header, fields | {"layers": [typed(LayerHeader, x) for x in fields["layers"]]}
        )
        _require_bounds(header)
        return header
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SavedCacheError):
            raise
        raise SavedCacheError(f"{path}: its header is not valid: {error}; save it again") from error


def _require_bounds(header: Header) -> None:
    """Raise ValueError if a number in a header exceeds the bounds of any cache."""
    count = len(header.layers)
    if not 1 <= count <= _MOST_LAYERS or len(header.specs) != count:
        raise ValueError(
            f"it has {count} layers and {len(header.specs)} specs; both must be the same number, "
            f"from 1 to {_MOST_LAYERS}"
        )
    if header.capacity is not None and not 1 <= header.capacity < MOST_TOKENS:
        raise ValueError(f"its capacity is {header.capacity} slots, not 1 to {MOST_TOKENS - 1}")
    for index, layer in enumerate(header.layers):
        for name, most in _MOST.items():
            if not 1 <= getattr(layer, name) <= most:
                raise ValueError(
                    f"{name} of layer {index} is {getattr(layer, name)}, not 1 to {most}"
                )
        if not 0 <= layer.floor <= layer.columns or not 1 <= layer.columns < MOST_TOKENS:
            raise ValueError(
                f"layer {index} was fed {layer.columns} columns, not 1 to {MOST_TOKENS - 1}, or "
                f"has a floor of {layer.floor}, not 0 to its columns"
            )
