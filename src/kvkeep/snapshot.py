"""Save a cache to a file, and load it again: safetensors, with a versioned JSON header.

Planes are written as they are encoded, so a cache that was loaded goes on to the last bit like one
that was never saved. Tensors are named `layer.part.plane`. The header, the metadata `kvkeep` of the
file, says what they are and has a checksum of each; `kvkeep_checksum` is that of the header.
Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep import tensorfile
from kvkeep.cache import Cache
from kvkeep.codec import Plain
from kvkeep.errors import CapacityError, SavedCacheError, StateError
from kvkeep.figures import slot_planes
from kvkeep.headers import DTYPES, require_seal, sealed, typed
from kvkeep.layer import LayerCache
from kvkeep.ledger import LayerState, Ledger, nothing_of
from kvkeep.planes import POSITION, Planes, PlaneSpec, slot_count

FORMAT = 1
"""The version of the format that is written, and the newest that is read."""

_HEADER, _TOKENS = "kvkeep", "tokens"


@dataclass(frozen=True)
class LayerHeader:
    """One layer: what it holds, and how it stands; see `kvkeep.ledger.Ledger`."""

    kind: str
    columns: int
    floor: int
    rows: int
    heads: int
    key_width: int
    value_width: int
    dtype: str
    apart: bool = False


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Args:
        specs: of each layer, as text.
        capacity: slots of fixed storage, or None.
        fingerprint: what the keys and values depend on, by name.
        routed: see `kvkeep.cache.Cache.routed`.
        notes: text that whoever saved it wanted to go with it, by name.
        checksums: XXH3 of each tensor's bytes, by its name.
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


def save(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    specs: list[str],
    fingerprint: Mapping[str, str],
    capacity: int | None = None,
    tokens: Tensor | None = None,
    notes: Mapping[str, str] | None = None,
    sync: bool = True,
) -> None:
    """Write a cache to a file, which is replaced as a whole or not at all.

    Args:
        tokens: the token ids that were fed, integers (B, columns), to go with it.
        notes: text to go with it, by name.
        sync: wait until the disk has it, so that it outlives a loss of power too.

    Raises:
        StateError: the cache is empty, or a forward is under way.
        SavedCacheError: the file cannot be written; what was there before is untouched.
    """
    if not cache.fed:
        raise StateError("this cache is empty; feed it something before it is saved")
    states = cache.states("save")
    tensors: dict[str, Tensor] = {}
    for index, state in enumerate(states):
        tensors |= {f"{index}.{name}": x for name, x in _tensors(state).items()}
    if tokens is not None:
        tensors[_TOKENS] = tokens.to(torch.int64)
    header = Header(
        FORMAT,
        version("kvkeep"),
        specs,
        capacity,
        dict(fingerprint),
        cache.routed,
        dict(notes or {}),
        [_described(layer, state) for layer, state in zip(cache.layers, states, strict=True)],
        {name: tensorfile.checksum(x) for name, x in tensors.items()},
    )
    try:
        tensorfile.write(Path(path), tensors, sealed(_HEADER, asdict(header)), sync=sync)
    except OSError as error:
        size = sum(x.nbytes for x in tensors.values())
        raise SavedCacheError(
            f"cannot save {size} bytes to {path}: {error}; what was there is as it was"
        ) from error


class Saved:
    """A file that was opened and found to be whole. Its tensors are mapped, not copied.

    Args:
        verify: compare all checksums, which reads the file once.

    Raises:
        SavedCacheError: it is not a saved cache, not whole, or of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if _HEADER not in metadata:
                    raise SavedCacheError(f"{self.path} is no saved cache: it has no kvkeep header")
                self.header = _header(metadata, self.path)
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise SavedCacheError(f"no file {self.path}; see where it was saved") from error
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, SavedCacheError):
                raise
            reason = " ".join(str(error).split())[:200]
            raise SavedCacheError(f"{self.path} cannot be read: {reason}; save it again") from error
        if set(self._tensors) != set(self.header.checksums):
            odd = sorted(set(self._tensors) ^ set(self.header.checksums))[:3]
            raise SavedCacheError(f"{self.path} is not whole: its header and data differ in {odd}")
        if verify:
            for name, x in self._tensors.items():
                if tensorfile.checksum(x) != self.header.checksums[name]:
                    raise SavedCacheError(
                        f"{self.path} is damaged: tensor {name} has another checksum than when it "
                        "was saved; save it again"
                    )

    @property
    def tokens(self) -> Tensor | None:
        """The token ids that were saved with it."""
        tokens = self._tensors.get(_TOKENS)
        return None if tokens is None else tokens.clone()

    def restore_to(self, cache: Cache, device: torch.device | None = None) -> None:
        """Fill an empty cache of the same specs, or one whose contents are given up.

        Raises:
            SavedCacheError: the file does not fit it; nothing was changed then.
        """
        if len(cache.layers) != len(self.header.layers):
            raise SavedCacheError(
                f"{self.path} holds {len(self.header.layers)} layers, the cache {len(cache.layers)}"
            )
        states = [
            self._state(index, layer, header)
            for index, (layer, header) in enumerate(
                zip(cache.layers, self.header.layers, strict=True)
            )
        ]
        for layer, state in zip(cache.layers, states, strict=True):
            layer.restore(state.to(device or torch.device("cpu")))
        cache.routed = self.header.routed

    def _state(self, index: int, layer: LayerCache, header: LayerHeader) -> LayerState:
        """A layer's state, of tensors that are known to fit it."""
        if header.kind != layer.kind:
            raise SavedCacheError(
                f"{self.path}, layer {index}: saved as {header.kind}, loaded as {layer.kind}"
            )
        dtype = DTYPES.get(header.dtype)
        if dtype is None or not 0 <= header.floor <= header.columns or not header.columns:
            raise SavedCacheError(f"{self.path}, layer {index}: {header} makes no sense")
        ledger, parts = Ledger(), dict[str, dict[str, Tensor]]()
        ledger.columns, ledger.floor = header.columns, header.floor
        ledger.apart = header.apart
        widths = (header.key_width, header.value_width)
        ledger.like = nothing_of(header.rows, header.heads, *widths, dtype)
        for name, x in self._tensors.items():
            place, _, rest = name.partition(".")
            if place != str(index):
                continue
            part, _, plane = rest.rpartition(".")
            if rest == "pads":
                ledger.pads = x.clone()
                _require(x, (header.rows,), torch.int64, self.path, name)
            elif part == "memory":
                ledger.memory[plane] = x.clone()
            else:
                parts.setdefault(part, {})[plane] = x
        known = {f"head.{i}" for i in range(header.heads)} if layer.policy.ragged else {"slots"}
        if (
            not parts
            or parts.keys() - known - {"aside", "bulk"}
            or known - parts.keys() - {"slots"}
        ):
            raise SavedCacheError(
                f"{self.path}, layer {index}: parts {sorted(parts)}, but it has {sorted(known)}"
            )
        for part, planes in parts.items():
            self._check(f"{index}.{part}", planes, _plane_specs(layer, part, header, dtype), header)
        block = {"bulk": layer.key_codec.block}
        counts = [slot_count(planes) * block.get(part, 1) for part, planes in parts.items()]
        held = counts if layer.policy.ragged else [sum(counts)]
        # Nothing was ever evicted, nor did a padded row leave its empty slots.
        whole = not header.floor or (layer.policy.budget is None and ledger.pads is None)
        if max(held) > header.columns or (whole and min(held) < header.columns):
            raise SavedCacheError(
                f"{self.path}, layer {index}: holds {held} of {header.columns} tokens fed, which "
                f"does not fit {layer.kind}"
            )
        state = LayerState(ledger, parts)
        try:
            layer.require_room(state)
        except CapacityError as error:
            raise SavedCacheError(f"{self.path}, layer {index}: {error}") from error
        return state

    def _check(
        self, part: str, planes: Planes, specs: Mapping[str, PlaneSpec], header: LayerHeader
    ) -> None:
        if planes.keys() != specs.keys():
            raise SavedCacheError(
                f"{self.path}, {part}: planes {sorted(planes)}, but its codecs and policy have "
                f"{sorted(specs)}"
            )
        slots = planes[POSITION].shape[2] if planes[POSITION].dim() > 2 else 0
        heads = 1 if ".head" in part else header.heads
        for name, spec in specs.items():
            own = 1 if spec.shared else heads
            shape = (header.rows, own, slots, *spec.shape)
            _require(planes[name], shape, spec.dtype, self.path, f"{part}.{name}")
        position = planes[POSITION]
        if (
            position.numel()
            and not -1 <= int(position.min()) <= int(position.max()) < header.columns
        ):
            raise SavedCacheError(
                f"{self.path}, {part}: positions beyond the {header.columns} tokens fed"
            )


def _tensors(state: LayerState) -> dict[str, Tensor]:
    found = {
        f"{part}.{name}": planes[name] for part, planes in state.parts.items() for name in planes
    }
    found |= {f"memory.{name}": x for name, x in state.ledger.memory.items()}
    if state.ledger.pads is not None:
        found["pads"] = state.ledger.pads.cpu()
    return found


def _described(layer: LayerCache, state: LayerState) -> LayerHeader:
    ledger = state.ledger
    assert ledger.like is not None
    k, v = ledger.like
    return LayerHeader(
        layer.kind,
        ledger.columns,
        ledger.floor,
        k.shape[0],
        k.shape[1],
        k.shape[3],
        v.shape[3],
        str(k.dtype),
        ledger.apart,
    )


def _plane_specs(
    layer: LayerCache, part: str, header: LayerHeader, dtype: torch.dtype
) -> dict[str, PlaneSpec]:
    """The planes a part of a layer has."""
    codecs = (layer.key_codec, layer.value_codec)
    if layer.key_codec.block > 1 and part != "bulk":
        codecs = (Plain(), Plain())
    return slot_planes(layer.policy, *codecs, header.key_width, header.value_width, dtype)


def _require(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, path: Path, name: str) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise SavedCacheError(
            f"{path}: {name} is {tuple(x.shape)} {x.dtype}, but its header and specs say "
            f"{shape} {dtype}"
        )


def _header(metadata: Mapping[str, str], path: Path) -> Header:
    try:
        require_seal(_HEADER, metadata)
    except ValueError as error:
        raise SavedCacheError(f"{path} is damaged: {error}; save it again") from error
    try:
        fields: dict[str, Any] = json.loads(metadata[_HEADER])
        if fields["format"] != FORMAT:
            raise SavedCacheError(
                f"{path} is of format {fields['format']}, this kvkeep reads {FORMAT}; install "
                f"kvkeep {fields.get('version')} or newer"
            )
        return typed(Header, fields | {"layers": [typed(LayerHeader, x) for x in fields["layers"]]})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SavedCacheError):
            raise
        raise SavedCacheError(f"{path}: its header is not one of kvkeep's: {error}") from error
