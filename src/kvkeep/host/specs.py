"""Specs for a model: one for all layers, one for each layer, or one for each type of layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvkeep.errors import SavedCacheError, SpecError
from kvkeep.spec import CacheSpec, PerType, as_spec, parse_specs

Specs = str | CacheSpec | Sequence[str | CacheSpec] | Mapping[str, str | CacheSpec]
"""One spec for all layers, one per layer, or one per layer type of the model, as a mapping or as
text: `full_attention=keep_all;sliding_attention=window:512`."""


@dataclass(frozen=True)
class LayerKind:
    """The attention of a layer with its own keys and values.

    Attributes:
        name: the model library's name for the type of layer.
        window: the sliding window in tokens, or `kvkeep.planes.Chunks` for chunked attention; None:
            no window.
        place: the layer's index among all layers of the model; None: its index among the layers
            with keys and values.
        readers: number of later layers that reuse its keys and values.
        slopes: slopes of its ALiBi bias, see `kvkeep.LayerCache`; None: no bias.
        latent: the width of values that are the first elements of their keys; None: values are
            separate.
        beside: elements at the end of a key that attention does not read.
        counts: whether the layer has no attention and only counts tokens.
    """

    name: str
    window: int | None
    place: int | None = field(default=None, compare=False)
    readers: int = field(default=0, compare=False)
    slopes: tuple[float, ...] | None = None
    latent: int | None = None
    beside: int = 0
    counts: bool = False


def fitting_some(spec: CacheSpec, kinds: Sequence[LayerKind], error: SpecError) -> SpecError:
    """The error to raise if a spec for all layers causes `error` in one of them. If the spec fits
    some types of layers, the message says how to give each type its own."""
    suggested, refused = {}, []
    for kind in dict.fromkeys(kinds):
        try:
            spec.layer(window=kind.window, capacity=2**20, latent=kind.latent)
        except SpecError:
            suggested[kind.name] = "keep_all+int8"
            refused.append(kind.name)
        else:
            suggested[kind.name] = str(spec).partition("@")[0]
    if len(refused) in (0, len(suggested)):
        return error
    typed = ";".join(f"{name}={one}" for name, one in suggested.items())
    return SpecError(
        f"in layers of type {' and '.join(refused)}: {error}. A spec may be given for each type of "
        f"layer: {suggested}, on the command line '{typed}'"
    )


def per_layer(spec: Specs, kinds: Sequence[LayerKind]) -> list[CacheSpec]:
    """Each layer's spec.

    Raises:
        SpecError: the text is not a spec, or the specs do not match the layers.
    """
    if isinstance(spec, str):
        spec = parse_specs(spec)
    if isinstance(spec, CacheSpec):
        return [spec] * len(kinds)
    if isinstance(spec, Mapping):
        names = {kind.name for kind in kinds}
        if names - set(spec) or set(spec) - names:
            example = ";".join(f"{name}=keep_all" for name in sorted(names))
            raise SpecError(
                f"specs for layer types {sorted(spec)}, but the model has {sorted(names)}; give "
                f"each of them one spec, such as {example}"
            )
        return [as_spec(spec[kind.name]) for kind in kinds]
    if not isinstance(spec, Sequence):
        raise SpecError(f"spec {spec!r}; give text such as 'keep_all', a list or a mapping")
    if len(spec) != len(kinds):
        raise SpecError(f"{len(spec)} specs for {len(kinds)} layers; give one each, or one for all")
    return [as_spec(one) for one in spec]


def file_in(spec: Specs) -> str | None:
    """The path of the file that a policy of these specs reads; None if no policy reads a file.

    Raises:
        SpecError: the text is not a spec.
    """
    return next((one.policy.file for one in each(spec) if one.policy.file), None)


def from_saved(
    spec: Specs, scorer: str | os.PathLike[str] | None, path: str | os.PathLike[str]
) -> Specs:
    """The specs in the file `path`. A path in them is data and never opened; the caller's `scorer`
    replaces it.

    Raises:
        SavedCacheError: the text is not a spec; or a policy reads a file, and `scorer` is None.
        SpecError: no spec can hold the path `scorer`.
    """
    try:
        named = file_in(spec)
    except SpecError as error:
        raise SavedCacheError(f"{path} cannot be loaded: {error}; save it again") from error
    if named is None:
        return spec
    if scorer is None:
        raise SavedCacheError(
            f"{path} was made with a scorer, then at {named[:100]!r}, and kvkeep opens no path "
            "that a file names; give the scorer: load(..., scorer=FILE), or for a session the "
            "cache kvzap:25%,scorer=FILE"
        )
    file = os.fspath(scorer)
    return changed(spec, lambda one: replace(one, policy=one.policy.reading(file)))


def changed(spec: Specs, change: Callable[[CacheSpec], CacheSpec]) -> Specs:
    """The specs, for the same layers, with `change` applied to each."""
    if isinstance(spec, str):
        spec = parse_specs(spec)
    if isinstance(spec, CacheSpec):
        return change(spec)
    if isinstance(spec, Mapping):
        return PerType({name: change(as_spec(one)) for name, one in spec.items()})
    return [change(as_spec(one)) for one in spec]


def each(spec: Specs) -> list[CacheSpec]:
    """The specs as a list: one for all layers, for each layer, or for each type of layer."""
    if isinstance(spec, str):
        spec = parse_specs(spec)
    if isinstance(spec, CacheSpec):
        return [spec]
    return [as_spec(one) for one in (spec.values() if isinstance(spec, Mapping) else spec)]
