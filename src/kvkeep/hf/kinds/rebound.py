"""Forwards of classes with other functions in place of their source file's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from types import CellType, FunctionType
from typing import Any, NamedTuple

from torch import nn


class Rebound(NamedTuple):
    """The forward of a class, with some global names of its source file rebound. It lies in an
    object of kvkeep because it names no module that defines it; see `kvkeep.host.hooks`."""

    forward: Any

    def of_module(self, module: nn.Module) -> Any:
        """A module's forward."""
        return partial(_run, self, module)

    @classmethod
    def of(cls, kind: type[nn.Module], names: Callable[[Any], dict[str, Any]]) -> Rebound:
        """`names`: returns the new values by name, given the module of the source file."""
        own: Any = inspect.unwrap(kind.forward)
        known = {**own.__globals__, **names(sys.modules[kind.__module__])}
        del known["__name__"]  # torch's compiler would use it to find the original values
        made = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
        made.__kwdefaults__, made.__module__ = own.__kwdefaults__, own.__module__
        return cls(_decorated(kind.forward, made))


def _run(rebound: Rebound, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return rebound.forward(module, *args, **kwargs)


def _decorated(own: Any, made: Any) -> Any:
    """The function `made` with the decorators of the function `own`."""
    under = getattr(own, "__wrapped__", None)
    if under is None:
        return made
    inner = _decorated(under, made)
    cells = (CellType(inner) if x.cell_contents is under else x for x in own.__closure__)
    copied = FunctionType(
        own.__code__, own.__globals__, own.__name__, own.__defaults__, tuple(cells)
    )
    copied.__kwdefaults__ = own.__kwdefaults__
    return update_wrapper(copied, inner)
