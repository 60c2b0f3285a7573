"""Registries: the policies, codecs and storages that a spec can name. A class is imported when it
is first used, and this module does not import torch, so that shells complete specs quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kvkeep.renamed import refuse_name


class Part(NamedTuple):
    """A policy, codec or storage.

    Args:
        kind: the name of its class.
        suggested: the spec that shell completion suggests; may be empty.
        example: a spec with small options for tests; may be empty.
        error: a codec's largest error of one token's key or value, relative to its norm, for small
            widths and normally distributed elements. (Two different tokens then have a distance
            of 1.4.)
        module: the module of its class; empty: the part's name.
    """

    kind: str
    suggested: str = ""
    example: str = ""
    error: float = 0.0
    module: str = ""


def exports(
    module: dict[str, Any],
    table: str,
    parts: Mapping[str, Part],
    others: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str] | None = None,
    *,
    internal: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` of a package, which imports a public name when it is first used, and the
    `__all__`, which is also the result of `dir`.

    Args:
        module: the package's `globals()`.
        table: the name of the dict of all parts, name in a spec -> class; empty: no parts.
        others: module -> its other public names.
        renamed: names of earlier versions -> their full names now.
        internal: module -> names for kvkeep's own code, which `__all__` lacks.
    """
    package = module["__name__"]
    homes = {name: home for home, names in others.items() for name in names}
    homes |= {part.kind: part.module or name for name, part in parts.items()}
    names = [*filter(None, [table]), *homes]
    homes |= {name: home for home, some in (internal or {}).items() for name in some}

    def find(name: str) -> Any:
        if name in homes:
            found = getattr(import_module(f"{package}.{homes[name]}"), name)
        elif name == table != "":
            found = {key: find(part.kind) for key, part in parts.items()}
        else:
            refuse_name(package, name, renamed or {})
        return module.setdefault(name, found)  # another thread may have found it first

    module["__dir__"] = lambda: sorted({*module, *names})
    return find, names
