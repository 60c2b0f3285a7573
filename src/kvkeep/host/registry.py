"""Which host serves a model: found by the module of one of the classes that the model is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kvkeep.errors import UnsupportedError
from kvkeep.host.contract import Host

_KNOWN = {"transformers.modeling_utils": ("transformers", "kvkeep.hf.host", "TransformersHost")}
"""Module of a library's base class of models -> the library's name, and the host's module and
class."""

_registered: dict[type, Callable[[Any], Host]] = {}


def register(models: type[nn.Module], host: Callable[[Any], Host]) -> None:
    """Let a host serve the models of a class, and of classes derived from it.

    Args:
        host: makes a host of a model; a `Host` class, for instance. It replaces what was
            registered for the class before.
    """
    _registered[models] = host


def host_of(model: Any) -> Host:
    """The host of a model: an object that answers for it, cheap to make.

    Args:
        model: of a known library, perhaps with adapters or a DistributedDataParallel around it.

    Raises:
        UnsupportedError: the model is of no known library, and nothing is registered for it.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for inner in _unwrapped(model):
        for kind in type(inner).__mro__:
            if kind in _registered:
                return _registered[kind](model)
            if kind.__module__ in _KNOWN:
                _, module, name = _KNOWN[kind.__module__]
                host: Host = getattr(import_module(module), name)(model)
                return host
    known = ", ".join([name for name, _, _ in _KNOWN.values()])
    raise UnsupportedError(
        f"{type(model).__name__} is not a model of {known}; give one, or tell kvkeep what it asks "
        "of a model by kvkeep.host.register(type(model), YourHost)"
    )


def load_model(name: str | None, dtype: str = "auto", **options: Any) -> tuple[Any, Any]:
    """A model by name, with its tokenizer: see `kvkeep.hf.models.load`."""
    loaded: tuple[Any, Any] = import_module("kvkeep.hf.models").load(name, dtype, **options)
    return loaded


def _unwrapped(model: Any) -> Iterator[Any]:
    """A model, then what it is wrapped around: by PEFT, by torch.compile."""
    yield model
    if hasattr(model, "get_base_model"):
        yield model.get_base_model()
    compiled = getattr(model, "_orig_mod", None)
    if compiled is not None:
        yield from _unwrapped(compiled)
