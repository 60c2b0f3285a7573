"""Saves a cache to a safetensors file with a versioned JSON header, and loads it again.

Planes are written in their encoded form, so a loaded cache gives bit-identical results. Tensors are
named `layer.part.plane`. The file's metadata entry `kvkeep` is the header: it describes the tensors
and has a checksum of each. The entry `kvkeep_checksum` is the header's checksum. Nothing is
unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kvkeep.cache import Cache
from kvkeep.errors import KVKeepError, SavedCacheError, StateError, reason_of
from kvkeep.files import tensor_file
from kvkeep.files.cache_header import FORMAT, HEADER, MOST_TOKENS, Header, LayerHeader, header_of
from kvkeep.files.headers import DTYPES, sealed
from kvkeep.files.tensor_file import MOST_HEADER, Layout
from kvkeep.geometry import Geometry
from kvkeep.layer.history import MEMORY, OF_ROWS, History, LayerState, by_part
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.recurrent import StateSpec
from kvkeep.layer.stats import slot_planes
from kvkeep.planes import HOLE, POSITION, Planes, PlaneSpec, slot_count
from kvkeep.reading import open_file, read_into
from kvkeep.storage.allocate import free_bytes
from kvkeep.storage.base import require_within
from kvkeep.version import __version__

_TOKENS = "tokens"
_CARRIED = "recurrent"
_TAIL = {"slots", "aside"}  # parts that hold all heads; with a tail, its plain tokens


def save(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    specs: list[str],
    fingerprint: Mapping[str, str],
    tokens: Tensor | None = None,
    notes: Mapping[str, str] | None = None,
    sync: bool = True,
    private: bool = False,
) -> None:
    """Write a cache to a file atomically.

    Args:
        cache: a cache with at least one token.
        path: the file to write.
        specs: spec of each layer, as text.
        fingerprint: everything that the keys and values depend on, by name.
        tokens: token ids fed, integers (B, columns), to save with the cache.
        notes: text to save with the cache, by name.
        sync: flush to disk, so that the file survives a power loss.
        private: only the owner may read a new file.

    Raises:
        StateError: the cache is empty, or a forward is running.
        SavedCacheError: the file cannot be written; the previous file is unchanged.
    """
    if not cache.fed:
        raise StateError("this cache is empty; feed it tokens before saving it")
    cache.mend("save")
    states = [layer.state() for layer in cache.layers]
    tensors: dict[str, Tensor] = {}
    for index, state in enumerate(states):
        tensors |= {f"{index}.{name}": x for name, x in _tensors(state).items()}
    tensors |= {f"{_CARRIED}.{name}": x for name, x in cache.carried.tensors().items()}
    if tokens is not None:
        tensors[_TOKENS] = tokens.to(torch.int64)
    limits = [x.slots.limit for x in cache.layers if x.slots.limit is not None]
    header = Header(
        FORMAT,
        __version__,
        specs,
        max(limits, default=None),
        dict(fingerprint),
        cache.routed,
        dict(notes or {}),
        [_described(layer, state) for layer, state in zip(cache.layers, states, strict=True)],
        {name: tensor_file.checksum(x) for name, x in tensors.items()},
    )
    try:
        metadata = sealed(HEADER, asdict(header))
        tensor_file.write(Path(path), tensors, metadata, sync=sync, private=private)
    except (OSError, tensor_file.HeaderError) as error:
        size = sum(x.nbytes for x in tensors.values())
        raise SavedCacheError(
            f"cannot save {size} bytes to {path}: {error}; the previous file is unchanged"
        ) from error


class Saved:
    """A saved cache with a validated header. Tensors are read into memory, not mapped, so
    truncating the file can neither change them nor crash the process. `nbytes` is the size of the
    file.

    Args:
        path: the file to read.
        verify: compare all checksums, which reads the whole file. False: read only the header until
            the tensors are needed.

    Raises:
        SavedCacheError: the file is not a saved cache, is incomplete, or has a newer version; or
            there is not enough memory for it.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        self._verify = verify
        self._tensors: dict[str, Tensor] | None = None
        with self._opened() as (handle, layout):
            self._metadata, self.nbytes = layout.metadata, layout.nbytes
            self.header = header_of(layout.metadata, self.path)
            if set(layout.entries) != set(self.header.checksums):
                odd = sorted(set(layout.entries) ^ set(self.header.checksums))[:3]
                raise SavedCacheError(
                    f"{self.path} is incomplete: its header and data name different tensors, such "
                    f"as {odd}; save it again"
                )
            if verify:
                self._tensors = self._read(handle, layout, list(layout.entries))

    @property
    def tokens(self) -> Tensor | None:
        """The saved token ids, int64 (B, columns), or None."""
        if _TOKENS not in self.header.checksums:
            return None
        tokens = (self._tensors or self._read_again([_TOKENS]))[_TOKENS]
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            raise SavedCacheError(
                f"{self.path}: its tokens are {tuple(tokens.shape)} {tokens.dtype}, not int64 "
                "(B, n); save it again"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < MOST_TOKENS:
            raise SavedCacheError(
                f"{self.path}: its tokens are not token ids, which are 0 to {MOST_TOKENS - 1}; "
                "save it again"
            )
        return tokens.clone()

    def restore_to(
        self,
        cache: Cache,
        devices: Sequence[torch.device] | None = None,
        carried: Mapping[str, StateSpec] | None = None,
    ) -> None:
        """Replace the contents of a cache, which must have the same specs.

        Args:
            cache: the cache to restore.
            devices: where each layer's tensors go; None: the CPU.
            carried: shape and dtype of the model's recurrent states; None: the model has none.

        Raises:
            SavedCacheError: the file does not fit the cache; nothing was changed.
        """
        if len(cache.layers) != len(self.header.layers):
            raise SavedCacheError(
                f"{self.path} holds {len(self.header.layers)} layers, but the cache has "
                f"{len(cache.layers)}; load it for the model it was saved with"
            )
        # Each layer's tensors are freed as soon as they are copied to the cache.
        tensors = self._tensors or self._read_again(list(self.header.checksums))
        self._tensors = None
        states_of = self._carried(tensors, carried or {})
        if bool(cache.carried) != bool(states_of):
            raise SavedCacheError(
                f"{self.path} holds {len(states_of)} states of recurrent layers, which do not "
                "fit the cache; load it for the model it was saved with"
            )
        of_layers = _by_layer(tensors, len(cache.layers))
        del tensors
        states = []
        for index, (layer, header) in enumerate(zip(cache.layers, self.header.layers, strict=True)):
            try:
                states.append(self._state(index, layer, header, of_layers.pop(0)))
            except SavedCacheError:
                raise
            except KVKeepError as error:  # a codec or policy rejects the header
                raise SavedCacheError(
                    f"{self.path}, layer {index}: {error}; save it again"
                ) from error
        for layer, device in zip(
            cache.layers, devices or [torch.device("cpu")] * len(states), strict=True
        ):
            layer.restore(states.pop(0).to(device))
        cache.carried.restore(states_of, cache.fed)
        cache.routed = self.header.routed

    def _carried(
        self, tensors: Mapping[str, Tensor], specs: Mapping[str, StateSpec]
    ) -> dict[str, Tensor]:
        """The recurrent states, checked against the model's specs."""
        start = f"{_CARRIED}."
        found = {
            name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)
        }
        if found.keys() != specs.keys():
            odd = sorted(found.keys() ^ specs.keys())[:3]
            raise SavedCacheError(
                f"{self.path} has different recurrent states than the model, such as {odd}; "
                "load it for the model it was saved with"
            )
        rows = self.header.layers[0].rows
        for name, spec in specs.items():
            if reason := spec.why_not(found[name], rows):
                raise SavedCacheError(f"{self.path}: state {name} {reason}; save it again")
        return {name: x.to(specs[name].device) for name, x in found.items()}

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, Layout]]:
        """Open the file and parse its header; errors raised in the body become SavedCacheErrors."""
        try:
            with open_file(self.path) as handle:
                size = os.fstat(handle).st_size
                first = bytearray(min(size, 8))
                read_into(handle, first, 0)
                head = bytearray(min(size, 8 + tensor_file.header_bytes(first, MOST_HEADER)))
                read_into(handle, head, 0)
                layout = Layout.read(head, MOST_HEADER)
                if HEADER not in layout.metadata:
                    raise SavedCacheError(
                        f"{self.path} is not a saved cache: it has no kvkeep header"
                    )
                if layout.nbytes != size:
                    raise ValueError(f"it has {size} bytes of {layout.nbytes}")
                yield handle, layout
        except FileNotFoundError as error:
            raise SavedCacheError(f"no file {self.path}; check the path it was saved to") from error
        except SavedCacheError:
            raise
        except (OSError, ValueError, MemoryError) as error:
            raise SavedCacheError(
                f"{self.path} cannot be read: {reason_of(error)}; save it again"
            ) from error

    def _read_again(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors from the file again; raise if the file has changed since it was opened."""
        with self._opened() as (handle, layout):
            if layout.metadata != self._metadata or not set(names) <= set(layout.entries):
                raise SavedCacheError(f"{self.path} has changed since it was opened; open it again")
            return self._read(handle, layout, names)

    def _read(self, handle: int, layout: Layout, names: list[str]) -> dict[str, Tensor]:
        size, free = layout.nbytes - layout.start, free_bytes(torch.device("cpu"))
        if free is not None and size > free:
            raise SavedCacheError(
                f"{self.path} holds {size} bytes, but {free} bytes of memory are free; load it on "
                "a larger machine"
            )
        found: dict[str, Tensor] = {}
        for name in names:
            entry = layout.entries[name]
            data = bytearray(entry.stop - entry.start)
            read_into(handle, data, layout.start + entry.start)
            x = found[name] = entry.tensor(data)
            if self._verify and tensor_file.checksum(x) != self.header.checksums[name]:
                raise SavedCacheError(
                    f"{self.path} is damaged: the checksum of tensor {name} does not match; save "
                    "it again"
                )
        return found

    def _state(
        self, index: int, layer: LayerCache, header: LayerHeader, tensors: Planes
    ) -> LayerState:
        """Build a layer's state from tensors, after checking that they fit the layer."""
        where = f"{self.path}, layer {index}"
        if header.kind != layer.kind:
            raise SavedCacheError(
                f"{where}: saved as {header.kind:.1000}, but the cache has "
                f"{layer.kind}; load it with the same specs, and the same scorer if they name one"
            )
        dtype = DTYPES.get(header.dtype)
        if dtype is None:
            raise SavedCacheError(f"{where}: unknown dtype {header.dtype:.50}")
        geometry = _geometry(header, dtype)
        history = self._history(index, header, tensors)
        history.geometry = geometry
        if reason := layer.policy.why_not_memory(history.memory, geometry):
            raise SavedCacheError(f"{where}: {reason}")
        parts = by_part({name: x for name, x in tensors.items() if name not in OF_ROWS})
        parts.pop(MEMORY, None)
        _require_parts(parts, layer, header, where)
        for part, planes in parts.items():
            self._check(f"{index}.{part}", planes, _plane_specs(layer, part, header, dtype), header)
        _require_tokens(parts, layer, header, where, padded=history.pads is not None)
        self._check_centre(index, history.centre, layer, header, parts)
        state = LayerState(history, parts)
        require_within(layer.slots.limit, state.length)
        return state

    def _history(self, index: int, header: LayerHeader, tensors: Planes) -> History:
        """A layer's history, with its numbers checked."""
        where, history = f"{self.path}, layer {index}", History()
        history.columns, history.floor = header.columns, header.floor
        history.joined, history.embedded = header.apart, header.embedded
        columns = header.columns
        bounds = {
            "pads": (torch.int64, 0, columns),
            "holes": (torch.int64, 0, columns),
            "kinds": (torch.int8, HOLE, 0),
            "offset": (torch.int64, 1 - MOST_TOKENS, MOST_TOKENS - 1),
        }
        for name, x in tensors.items():
            part, _, own = name.rpartition(".")
            if part == MEMORY:
                history.memory[own] = x.clone()
            elif name in OF_ROWS:
                setattr(history, name, x.clone())
            if name not in bounds:
                continue
            dtype, least, most = bounds[name]
            shape = (header.rows, *(x.shape[1:2] if name == "kinds" else ()))
            _require(x, shape, dtype, self.path, f"{index}.{name}")
            within = not x.numel() or least <= int(x.min()) <= int(x.max()) <= most
            if not within or (x.dim() == 2 and x.shape[1] > columns):
                raise SavedCacheError(
                    f"{where}: {name} {str(x.tolist())[:80]} are outside of {least} to {most}, or "
                    f"more than {columns} in a row; save it again"
                )
        return history

    def _check_centre(
        self,
        index: int,
        centre: Tensor | None,
        layer: LayerCache,
        header: LayerHeader,
        parts: Mapping[str, Planes],
    ) -> None:
        expected = bool(layer.key_codec.centre and header.columns)
        given = layer.slots.late and not parts.keys() - _TAIL  # maybe whole keys, without a centre
        if (centre is not None) != expected and not (centre is None and given):
            raise SavedCacheError(
                f"{self.path}, layer {index}: its centre is missing, or its codec has none; "
                "save it again"
            )
        if centre is None:
            return
        shape = (header.rows, header.heads, 2, header.key_width)
        _require(centre, shape, torch.float32, self.path, f"{index}.centre")
        if not bool(centre.isfinite().all() and (centre[:, :, 1] > 0).all()):
            raise SavedCacheError(
                f"{self.path}, layer {index}: its centre is not finite, or its scales are not "
                "above 0; save it again"
            )

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
            and not HOLE <= int(position.min()) <= int(position.max()) < header.columns
        ):
            raise SavedCacheError(
                f"{self.path}, {part}: positions beyond the {header.columns} tokens fed"
            )


def _tensors(state: LayerState) -> dict[str, Tensor]:
    found = state.tensors()
    for name in OF_ROWS:
        held = getattr(state.history, name)
        if held is not None:
            found[name] = held.cpu()
    return found


def _described(layer: LayerCache, state: LayerState) -> LayerHeader:
    history = state.history
    assert history.geometry is not None
    rows, heads, key_width, value_width, dtype, _ = history.geometry
    return LayerHeader(
        layer.kind,
        history.columns,
        history.floor,
        rows,
        heads,
        key_width,
        value_width,
        str(dtype),
        history.joined,
        history.embedded,
    )


def _geometry(header: LayerHeader, dtype: torch.dtype) -> Geometry:
    return Geometry(header.rows, header.heads, header.key_width, header.value_width, dtype)


def _plane_specs(
    layer: LayerCache, part: str, header: LayerHeader, dtype: torch.dtype
) -> dict[str, PlaneSpec]:
    """The planes that a part of a layer must have, by name."""
    codecs = layer.codecs
    if layer.slots.late and part in _TAIL:
        codecs = codecs.unencoded
    return slot_planes(layer.policy, *codecs, _geometry(header, dtype))


def _require_parts(
    parts: Mapping[str, Planes], layer: LayerCache, header: LayerHeader, where: str
) -> None:
    """Check a layer's parts against its spec."""
    late, ragged = layer.slots.late, layer.policy.ragged
    heads = {f"head.{i}" for i in range(min(header.heads, len(parts)))} if ragged else set()
    known = heads | ({"bulk"} if late and not ragged else set())
    known |= _TAIL if late or not ragged else set()
    own = len(parts.keys() & heads)
    whole = not ragged or own == header.heads or (late and not own)
    # In chunked attention, a layer holds no slot at the start of a chunk.
    if (not parts and not layer.chunked) or parts.keys() - known or not whole:
        raise SavedCacheError(
            f"{where}: parts {sorted(parts)}, but specs have {sorted(known)}, and {header.heads} "
            "heads; save it again"
        )


def _require_tokens(
    parts: Mapping[str, Planes], layer: LayerCache, header: LayerHeader, where: str, *, padded: bool
) -> None:
    """Check the number of tokens in a layer's parts against the columns fed."""
    block = {"bulk": layer.key_codec.block}
    counts = {part: slot_count(planes) * block.get(part, 1) for part, planes in parts.items()}
    heads = [count for part, count in counts.items() if part.startswith("head.")]
    shared = sum(counts.values()) - sum(heads)
    held = [shared + count for count in heads] or [shared]
    # If nothing was evicted and no empty slot was freed, all tokens must be present.
    bounded = layer.policy.evicts or layer.policy.ragged  # kvzip has no budget
    whole = not header.floor or not (bounded or padded)
    if max(held) > header.columns or (whole and min(held) < header.columns):
        raise SavedCacheError(
            f"{where}: holds {held} of {header.columns} tokens fed, which does not fit {layer.kind}"
        )


def _by_layer(tensors: Mapping[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer, named without the layer's index."""
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    numbers = {str(index): index for index in range(layers)}
    for name, x in tensors.items():
        place, _, rest = name.partition(".")
        if place in numbers:
            found[numbers[place]][rest] = x
    return found


def _require(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, path: Path, name: str) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise SavedCacheError(
            f"{path}: {name} is {tuple(x.shape)} {x.dtype}, but its header and specs say "
            f"{shape} {dtype}"
        )
