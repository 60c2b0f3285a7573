"""Foreign hooks: functions set in a model by its user, which may change keys and values.

A hook's results cannot be hashed, because they may depend on anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules import module as torch_module

_LIBRARIES = {
    "accelerate",
    "bitsandbytes",
    "kvkeep",
    "lightning",
    "litgpt",
    "peft",
    "torch",
    "torchao",
    "transformers",
}
"""Packages whose hooks change no result, or depend only on weights, buffers, modules, config and
adapters, which a fingerprint covers."""

_PROCESS = token_hex(4)
"""Distinguishes this process's hooks from other processes' hooks."""

_next = count(-1, -1)
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_PRE, _POST = "forward pre-hook", "forward hook"

_ACCELERATE = "_hf_hook"
"""Attribute of modules in which accelerate keeps its hook."""


def foreign_hooks(model: nn.Module) -> dict[str, str]:
    """The hooks of a model's forwards that no known library has set: forward hooks and pre-hooks of
    its modules, torch's global hooks, and forwards that replace a module's own.

    Returns:
        A description of each module's hooks, by the module's name: kind, function, and a number
        unique among all hooks of all processes.
    """
    found = dict[str, str]()

    def note(place: str, kind: str, number: int, hook: Any) -> None:
        while isinstance(hook, partial):
            hook = hook.func
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        text = f"{kind} {name} ({_PROCESS}-{number})"
        found[place] = f"{found[place]}, {text}" if place in found else text

    def look(place: str, module: nn.Module | None, hooks: Mapping[str, Mapping[int, Any]]) -> None:
        for kind, some in hooks.items():
            for number, hook in some.items():
                if _is_foreign(hook, module):
                    note(place, kind, number, hook)

    every = torch_module
    own = {_PRE: every._global_forward_pre_hooks, _POST: every._global_forward_hooks}
    look("all modules", None, own)
    for name, module in model.named_modules():
        held: Mapping[str, Any] = vars(module)
        own = {_PRE: module._forward_pre_hooks, _POST: module._forward_hooks}
        for kind, call in (("forward", held.get("forward")), ("hook", held.get(_ACCELERATE))):
            if call is not None:
                own[kind] = {_number_of(call): call}
        look(name or type(module).__name__, module, own)
    return found


def _number_of(call: Any) -> int:
    """A negative number for a function that torch has not numbered; a new one for each call if the
    function cannot be hashed."""
    try:
        return _numbers.setdefault(call, next(_next))
    except TypeError:
        return next(_next)


def _is_foreign(call: Any, module: nn.Module | None) -> bool:
    return not all(name.partition(".")[0] in _LIBRARIES for name in _definers(call, module))


def _definers(call: Any, module: nn.Module | None) -> Iterator[str]:
    """The names of the Python modules that define a hook, the functions that it wraps, and the
    hooks that accelerate combines in it. The forward of the module's own class is excluded."""
    if isinstance(call, partial):
        parts: list[Any] = [call.func, *call.args, *call.keywords.values()]
        inner: list[Any] = [x for x in parts if _is_function(x)]
    else:
        function = getattr(call, "__func__", call)
        owner: Any = type(module)
        if (
            module is not None
            and getattr(call, "__self__", None) is module
            and function is owner.forward
        ):
            return
        # Not `__module__`, which functools.wraps copies from the wrapped function.
        known: Mapping[str, Any] = getattr(function, "__globals__", {})
        yield known.get("__name__", type(function).__module__)
        inner = list(getattr(call, "hooks", ()))
    wrapped: Callable[..., Any] | None = getattr(call, "__wrapped__", None)
    for part in inner if wrapped is None else (*inner, wrapped):
        yield from _definers(part, module)


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, nn.Module | type)
