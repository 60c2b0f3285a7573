"""ModelState: all that a compiled step of a model depends on, but for the values of weights."""

from __future__ import annotations

import builtins
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter, is_
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from kvkeep.version import __version__

_UNRELATED = {"_name_or_path", "name_or_path", "transformers_version", "generation_config"}
_BOOKKEEPING = vars(nn.Module()).keys() - {"training"} | {"_is_stateful", "forward"}
"""What a config, and what a module, has that no step depends on, or that is looked at apart."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NAMED = (type, BuiltinFunctionType, ModuleType, nn.Module)
"""What is known by its name."""
_DEEPEST = 8  # of objects within objects

_ADDRESS, _DTYPE = torch._C.TensorBase.data_ptr, attrgetter("dtype")


class ModelState:
    """What a model is now: its modules, hooks and weights, and the code that its forward runs.

    Its code is the forwards of its modules and all functions that these name, in turn: functions
    of their files, methods, functions that modules hold. A model with a replaced helper function
    is in another state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parts = [*model.modules()]
        # By name in a dictionary, or of a class: what has to stay.
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._members: list[tuple[type, str, Any]] = []
        for part in self._parts:
            for owner in (part._parameters, part._buffers, part._modules):
                self._held += [(owner, name, x) for name, x in owner.items() if x is not None]
            self._held.append((vars(part), "forward", vars(part).get("forward")))
        weights = [x for _, _, x in self._held if isinstance(x, Tensor)]
        self._weights: list[Any] = weights
        self._addresses, self._dtypes = [*map(_ADDRESS, weights)], [*map(_DTYPE, weights)]
        hooks = [x for part in self._parts for x in (part._forward_hooks, part._forward_pre_hooks)]
        self._hooks: list[Any] = hooks
        self._hooked = [*map(tuple, hooks)]  # their numbers, which none has twice
        self._texts: dict[tuple[int, type], str] = {}  # of functions
        self._modules = [
            (name, _name(type(part)), self._member(type(part), "forward"), self._settings(part))
            for name, part in model.named_modules()
        ]
        self._owners, self._names, self._values = _columns(self._held)
        self._kinds, self._member_names, self._member_values = _columns(self._members)

    def unchanged(self) -> bool:
        """Whether the model is still the same."""
        weights = self._weights
        # A few C calls for each entry: Python would take a twentieth of a step.
        return (
            not torch.is_autocast_enabled(self._model.device.type)
            and not _hooked_everywhere()
            and list(map(tuple, self._hooks)) == self._hooked
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and all(map(is_, map(getattr, self._kinds, self._member_names), self._member_values))
            and list(map(_ADDRESS, weights)) == self._addresses
            and list(map(_DTYPE, weights)) == self._dtypes
        )

    def key(self) -> str | None:
        """A digest of the state, of versions and of the processor, the same in all processes; None
        if somebody but kvkeep has hooked a module or replaced its forward."""
        model = self._model
        if _hooked_everywhere() or torch.is_autocast_enabled(model.device.type):
            return None
        if not all(map(_is_ours, self._replacing())):
            return None
        config = {k: v for k, v in model.config.to_dict().items() if k not in _UNRELATED}
        first: dict[int, str] = {}  # the name of each weight, by which those tied to it are known
        weights = [
            (name, first.setdefault(id(x), name), _name(type(x)), *map(str, _layout(x)))
            for named in (model.named_parameters, model.named_buffers)
            for name, x in named(remove_duplicate=False)
        ]
        about = (_versions(), _processor(), config, weights, self._modules)
        text = json.dumps(about, sort_keys=True, default=_sorted)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def _replacing(self) -> Iterator[Any]:
        """The modules' hooks, and the forwards set in place of those of their classes."""
        for part in self._parts:
            yield from part._forward_hooks.values()
            yield from part._forward_pre_hooks.values()
            own = vars(part).get("forward")
            own = getattr(own, "replaced", own)  # by kvkeep
            if own is not None:
                yield own

    # -- texts: the same for objects that do the same -------------------------------------------

    def _settings(self, part: nn.Module) -> dict[str, str]:
        """A module's attributes."""
        own = vars(part)
        names = [x for x in own if x not in _BOOKKEEPING | _UNRELATED and not _is_ours(own[x])]
        for name in names:
            if callable(own[name]) or isinstance(own[name], _PLAIN):
                self._held.append((own, name, own[name]))
        texts = {name: self._text(own[name], type(part)) for name in names}
        return {name: text for name, text in texts.items() if text}

    def _member(self, kind: type, name: str) -> str:
        """Of what a class has."""
        found = getattr(kind, name, None)
        if not isinstance(found, MethodType):  # a new object each time
            self._members.append((kind, name, found))
        return self._text(found, kind)

    def _text(self, value: Any, kind: type, depth: int = 0) -> str:
        """Of anything that code or a module refers to; empty for empty collections.

        Args:
            kind: the class whose methods a function calls as those of its first argument.
        """
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            return f"{_name(type(value))}{_layout(value)}"
        if isinstance(value, FunctionType):
            return self._function(value, kind)
        if isinstance(value, _NAMED) or depth > _DEEPEST:
            return _name(value)
        deeper = partial(self._text, kind=kind, depth=depth + 1)
        if isinstance(value, MethodType):
            return self._text(value.__func__, type(value.__self__), depth + 1)
        if isinstance(value, property):
            return ",".join(map(deeper, (value.fget, value.fset)))
        if isinstance(value, partial):
            return ",".join(map(deeper, (value.func, value.args, value.keywords)))
        if isinstance(value, Mapping):
            items = [f"{deeper(k)}:{deeper(x)}" for k, x in value.items()]
            return f"{{{','.join(items)}}}" if items else ""
        if isinstance(value, list | tuple | set | frozenset):
            texts = map(deeper, value)
            unordered = isinstance(value, set | frozenset)
            return f"[{','.join(sorted(texts) if unordered else texts)}]" if value else ""
        return _name(value) if _of_package(value, "transformers") else self._instance(value, deeper)

    def _instance(self, value: Any, deeper: Any) -> str:
        """Of an object of a class that no version names."""
        call = getattr(type(value), "__call__", None)  # noqa: B004 - whether, and which
        code = self._text(call, type(value)) if isinstance(call, FunctionType) else ""
        return f"{_name(value)}({deeper(getattr(value, '__dict__', None))}){code}"

    def _function(self, function: FunctionType, kind: type) -> str:
        if _of_package(function, "torch", "kvkeep"):
            return _name(function)
        known = id(function), kind
        if known not in self._texts:
            self._texts[known] = _name(function)  # should it call itself
            code, names = _compiled(function.__code__)
            held = [function.__defaults__, function.__kwdefaults__]
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    held.append(cell.cell_contents)
            parts = [code, *[self._text(x, kind) for x in held]]
            for name in names:
                owner = function.__globals__
                if name in owner:
                    self._held.append((owner, name, owner[name]))
                    # Not what is in it: registries fill while programs run.
                    parts.append(f"{name}={self._text(owner[name], kind, _DEEPEST + 1)}")
                elif not hasattr(builtins, name) and hasattr(kind, name):
                    parts.append(f"self.{name}={self._member(kind, name)}")
            digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
            self._texts[known] = f"{_name(function)}#{digest[:16]}"
        return self._texts[known]


def _columns(entries: Iterable[tuple[Any, str, Any]]) -> tuple[list[Any], list[str], list[Any]]:
    different = {(id(owner), name): (owner, name, value) for owner, name, value in entries}
    owners, names, values = zip(*different.values(), strict=True)
    return [*owners], [*names], [*values]


def _hooked_everywhere() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _is_ours(value: Any) -> bool:
    return _of_package(value.func if isinstance(value, partial) else value, "kvkeep")


def _of_package(value: Any, *packages: str) -> bool:
    """Whether a function, or the class of another object, is defined in one of these."""
    defined = getattr(value, "__module__", None) or type(value).__module__
    return str(defined).partition(".")[0] in packages


def _name(value: Any) -> str:
    """Of a class, function or module, or of the class of another object."""
    named = value if hasattr(value, "__qualname__") else type(value)
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{named.__module__}.{named.__qualname__}"


def _layout(x: Tensor) -> tuple[list[int], list[int], torch.dtype]:
    return [*x.shape], [*x.stride()] if x.layout is torch.strided else [], x.dtype


def _compiled(code: CodeType) -> tuple[str, list[str]]:
    """What a code object does, and the names that it and those within it use."""
    parts, names = [code.co_code.hex(), repr(code.co_names)], dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, more = _compiled(constant)
            parts.append(inner)
            names |= dict.fromkeys(more)
        else:
            unordered = isinstance(constant, frozenset)
            parts.append(repr(sorted(constant, key=repr) if unordered else constant))
    return " ".join(parts), [*names]


def _sorted(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


@cache
def _versions() -> list[str]:
    # A version of kvkeep that is being developed changes without its number.
    source, root = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted([*root.glob("*.py"), *root.glob("[agh]*/*.py")]):  # attention, graph, hf
        source.update(file.read_bytes())
    versions = (__version__, torch.__version__, transformers.__version__)
    return [*map(str, versions), source.hexdigest()]


def _processor() -> list[str]:
    """The instructions that the compiler may use."""
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), _flags()]


@cache
def _flags() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
