"""Find a model's host by the base classes of the model's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.host.contract import Host
from kvkeep.libraries import LIBRARIES, class_at, loader_of

_KNOWN = {one.models: one for one in LIBRARIES.values()}

_registered: dict[type, Callable[[Any], Host]] = {}


def register(models: type[nn.Module], host: Callable[[Any], Host]) -> None:
    """Register a host for a class of models and its subclasses; it replaces an earlier
    registration.

    Args:
        host: creates a host from a model, such as a subclass of `Host`.
    """
    _registered[models] = host


def host_of(model: Any) -> Host:
    """The host of a model. Creating a host is cheap.

    Args:
        model: a model of a known library or a registered class, possibly wrapped by PEFT,
            torch.compile or DistributedDataParallel.

    Raises:
        UnsupportedError: the library is not known, and no host is registered for the class.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for inner in _unwrapped(model):
        for kind in type(inner).__mro__:
            if kind in _registered:
                return _registered[kind](model)
            if kind.__module__ in _KNOWN:
                host: Host = class_at(_KNOWN[kind.__module__].host)(model)
                return host
    known = ", ".join(one.title for one in LIBRARIES.values())
    raise UnsupportedError(
        f"{type(model).__name__} is not a model of {known}; give a model of these libraries, or "
        "write a subclass of kvkeep.host.Host and call kvkeep.host.register(type(model), YourHost)"
    )


def require_host(host: str) -> None:
    """Raise SpecError for an unknown library, UnsupportedError if it is not installed."""
    if host not in LIBRARIES:
        raise SpecError(f"no host {host!r}; there is {', '.join(LIBRARIES)}")
    if find_spec(host) is None:
        raise UnsupportedError(f"{host} is not installed; install it as docs/{host}.md says")


def load_model(
    name: str | None, dtype: str = "auto", *, host: str = "transformers", **options: Any
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name, dtype, options: see `kvkeep.hf.models.load` and `kvkeep.litgpt.checkpoint.load`.
        host: the model's library, a key of `LIBRARIES`.
    """
    require_host(host)
    loaded: tuple[Any, Any] = loader_of(host).load(name, dtype, **options)
    return loaded


def load_tokenizer(directory: str) -> Any:
    """The tokenizer in a directory, as transformers loads it."""
    return loader_of("transformers").load_tokenizer(directory)


def _unwrapped(model: Any) -> Iterator[Any]:
    """The model, then the models inside wrappers of PEFT and torch.compile."""
    yield model
    if hasattr(model, "get_base_model"):
        yield model.get_base_model()
    compiled = getattr(model, "_orig_mod", None)
    if compiled is not None:
        yield from _unwrapped(compiled)
