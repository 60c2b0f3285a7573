"""Specs for a model: one for all layers, one for each layer, or one for each type of layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvkeep.errors import SpecError
from kvkeep.spec import CacheSpec, as_spec, parse_specs

Specs = str | CacheSpec | Sequence[str | CacheSpec] | Mapping[str, str | CacheSpec]
"""One spec for all layers, one per layer, or one per layer type of the model, as a mapping or as
text: `full_attention=keep_all;sliding_attention=window:512`."""


@dataclass(frozen=True)
class LayerKind:
    """The attention of a layer with keys and values of its own: the model library's name for its
    type, its sliding window in tokens (None: it has none), its place among all layers of the model,
    which also counts the others (None: the same as among those with keys and values), and how many
    layers without them reuse its own. In `chunked` attention the window begins at a multiple of its
    size: a query at position p sees positions from p // window * window on."""

    name: str
    window: int | None
    place: int | None = field(default=None, compare=False)
    readers: int = field(default=0, compare=False)
    chunked: bool = False


def fitting_some(spec: CacheSpec, kinds: Sequence[LayerKind], error: SpecError) -> SpecError:
    """The error to raise if a spec for all layers causes `error` in one of them. If the spec fits
    some types of layers, the message says how to give each type its own."""
    suggested, refused = {}, []
    for kind in dict.fromkeys(kinds):
        try:
            spec.layer(window=kind.window, chunked=kind.chunked, capacity=2**20)
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
