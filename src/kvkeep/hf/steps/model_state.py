"""ModelState: everything on which a model's compiled step depends, except the values of weights."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import cache, cached_property, partial, partialmethod
from itertools import chain, repeat
from operator import attrgetter, call, contains, is_, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from kvkeep.hf.weight_parts import is_joined, is_plain
from kvkeep.version import __version__

_UNRELATED = {"_name_or_path", "name_or_path", "transformers_version", "generation_config"}
_BOOKKEEPING = vars(nn.Module()).keys() - {"training"} | {"_is_stateful", "extra_repr", "forward"}
"""Attributes of configs and modules on which no step depends or that are compared separately."""
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), slice, range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_STATELESS = ("logging", "weakref", "_weakref", "_thread", "threading", "transformers", "torch")
"""Packages with classes whose objects are described by the name of their class only."""
_KNOWN = ("torch", "kvkeep", "numpy", *sys.stdlib_module_names)
"""Packages whose functions are described by their names only."""
_OF_A_CLASS = (FunctionType, staticmethod, classmethod, property, partialmethod, bool, int, float)
"""Types of a user's class's attributes on which a forward may depend, whatever their names."""
_CALLABLES: dict[Any, tuple[str, ...]] = {
    staticmethod | classmethod: ("__func__",),
    MethodType: ("__self__", "__func__"),
    property: ("fget", "fset"),
    partial | partialmethod: ("func", "args", "keywords"),
    cached_property: ("func",),
}
"""Callable objects, and the names of the attributes that describe them."""
_DEEPEST = 8  # most levels of objects within objects that are described

_ADDRESS, _DTYPE = torch._C.TensorBase.data_ptr, attrgetter("dtype")


class ModelState:
    """The current state of a model: its modules, hooks and weights, and the code of its forward.

    This code consists of all functions of its modules' classes that a forward may call, and of the
    functions and values that these refer to: in their files, in modules that they import, and in
    attributes of modules. So if a helper function is replaced, the state changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parts = [*model.modules()]
        # Objects that must stay the same: (dictionary or class, name, object).
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._members: list[tuple[type, str, Any]] = []
        self._unreplaced: list[dict[str, Any]] = []  # attributes of modules with class's forward
        for part in self._parts:
            for owner in (part._parameters, part._buffers, part._modules):
                self._held += [(owner, name, x) for name, x in owner.items() if x is not None]
            own = vars(part)
            if "forward" in own:
                self._held.append((own, "forward", own["forward"]))
            else:
                self._unreplaced.append(own)
        joined = [x for _, _, x in self._held if is_joined(x)]
        for x in joined:  # grows while it is iterated: parts may consist of further parts
            own = {name: vars(x)[name] for name in x.__tensor_flatten__()[0] if name in vars(x)}
            self._held += [(vars(x), name, part) for name, part in own.items()]
            joined += filter(is_joined, own.values())
        weights = [x for _, _, x in self._held if isinstance(x, Tensor) and _has_memory(x)]
        self._weights: list[Any] = weights
        self._addresses, self._dtypes = [*map(_ADDRESS, weights)], [*map(_DTYPE, weights)]
        hooks = [x for part in self._parts for x in (part._forward_hooks, part._forward_pre_hooks)]
        self._unhooked: list[Any] = [x for x in hooks if not x]
        self._hooks: list[Any] = [x for x in hooks if x]
        self._hooked = [*map(tuple, self._hooks)]  # ids of hooks, which torch never reuses
        self._texts: dict[int, str] = {}  # descriptions of functions
        self._inside: set[int] = set()  # objects whose description is being made
        self._unknown = ""  # the class of an object that cannot be described
        self._methods = self._methods_of({type(part) for part in self._parts})
        self._described: Any = None
        try:
            kinds = dict.fromkeys(type(part) for part in self._parts)
            code = [self._called("forward"), *map(self._own_code, kinds)]
            modules = [self._module(*named) for named in model.named_modules()]
            self._described = code, modules
        except Exception as error:  # objects of other libraries may raise any exception
            self._unknown = repr(error)
        self._owners, self._of_owners, self._values = _getters(self._held, itemgetter)
        self._kinds, self._of_kinds, self._member_values = _getters(self._members, attrgetter)

    def unchanged(self) -> bool:
        """Whether the model is unchanged."""
        weights = self._weights
        # Iterators in C, because Python's loops would take a twentieth of a step.
        with suppress(KeyError, AttributeError):  # an attribute was removed
            return (
                not torch.is_autocast_enabled(self._model.device.type)
                and not _hooked_everywhere()
                and not any(self._unhooked)
                and list(map(tuple, self._hooks)) == self._hooked
                and not any(map(contains, self._unreplaced, repeat("forward")))
                and all(map(is_, _gotten(self._of_owners, self._owners), self._values))
                and all(map(is_, _gotten(self._of_kinds, self._kinds), self._member_values))
                and list(map(_ADDRESS, weights)) == self._addresses
                and list(map(_DTYPE, weights)) == self._dtypes
            )
        return False

    def key(self) -> str | None:
        """A digest of the state, of versions and of the processor, the same in all processes. None:
        code other than kvkeep has hooked a module or replaced its forward, or a module holds an
        object that cannot be described."""
        model = self._model
        if _hooked_everywhere() or torch.is_autocast_enabled(model.device.type):
            return None
        if not all(map(_is_ours, self._replacing())):
            return None
        first: dict[int, str] = {}  # the first name of each weight; tied weights share it
        weights = [
            (name, first.setdefault(id(x), name), self._weight(x))
            for named in (model.named_parameters, model.named_buffers)
            for name, x in named(remove_duplicate=False)
        ]
        try:
            config = {k: v for k, v in model.config.to_dict().items() if k not in _UNRELATED}
            about = self._text(config)
        except Exception:  # as in the constructor
            return None
        if self._unknown:
            return None
        text = repr((_versions(), _processor(), about, weights, self._described))
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:40]

    def _replacing(self) -> Iterator[Any]:
        """The modules' hooks, and forwards that replace those of the modules' classes."""
        for part in self._parts:
            yield from part._forward_hooks.values()
            yield from part._forward_pre_hooks.values()
            own = vars(part).get("forward")
            if own is not None and _is_ours(own):
                own = getattr(own, "replaced", own)
            if own is not None:
                yield own

    # -- descriptions: equal texts for objects that behave equally ------------------------------

    def _methods_of(self, kinds: set[type[nn.Module]]) -> dict[str, list[tuple[type, Any]]]:
        """The attributes of the modules' classes, except torch's, by name."""
        found: dict[str, list[tuple[type, Any]]] = {}
        for owner in sorted({base for kind in kinds for base in kind.__mro__}, key=_name):
            if not _is_of(owner, "torch", "kvkeep", "builtins"):
                for name, value in vars(owner).items():
                    found.setdefault(name, []).append((owner, value))
        return found

    def _own_code(self, kind: type[nn.Module]) -> str:
        """The description of a user's module class with all its functions, since its code may call
        them under other names."""
        if _is_of(kind, "torch", "transformers", "kvkeep"):
            return ""
        names = [name for name, value in vars(kind).items() if isinstance(value, _OF_A_CLASS)]
        return "".join(map(self._called, names))

    def _module(self, name: str, part: nn.Module) -> tuple[str, str, dict[str, str]]:
        own = vars(part)
        names = [x for x in own if x not in _BOOKKEEPING | _UNRELATED and not _is_ours(own[x])]
        for held in names:
            if callable(own[held]) or isinstance(own[held], _PLAIN):
                self._held.append((own, held, own[held]))
        texts = {held: self._text(own[held]) for held in names}
        return name, _name(type(part)), {held: text for held, text in texts.items() if text}

    def _called(self, name: str) -> str:
        """The description of the attributes of this name in all modules' classes."""
        texts = []
        for owner, value in self._methods.get(name, ()):
            found = getattr(owner, name, None)
            if found is getattr(owner, name, None):  # bound methods are new objects each time
                self._members.append((owner, name, found))
            texts.append(f"{_name(owner)}.{name}={self._text(value, depth=_DEEPEST - 3)}")
        return ";".join(texts)

    def _weight(self, x: Any) -> str:
        """The description of a weight: its class and layout, and the descriptions of its parts."""
        text = f"{_name(type(x))}{_layout(x)}"
        if is_joined(x):
            names, context = x.__tensor_flatten__()
            inner = [part for name in names if isinstance(part := getattr(x, name), Tensor)]
            text += f"{self._text(context)}{[*map(self._weight, inner)]}"
        return text

    def _text(self, value: Any, depth: int = 0) -> str:
        """The description of any object to which code or a module refers; empty for an empty
        collection."""
        kind = type(value)
        numbers = kind.__module__ == "numpy" and kind.__name__ != "ndarray"
        if isinstance(value, _PLAIN) or numbers:
            return repr(value)
        if isinstance(value, Tensor):
            return f"{_name(kind)}{_layout(value)}"
        if kind is FunctionType:
            return self._function(value)
        if isinstance(value, nn.Module):
            same = any(value is part for part in self._parts)
            return _name(kind) if same else self._not_known(value)
        if isinstance(value, type | ModuleType | BuiltinFunctionType) or _is_config(value):
            return _name(value)
        if id(value) in self._inside or depth > _DEEPEST:
            return _name(kind)
        self._inside.add(id(value))
        try:
            return self._compound(value, depth + 1)
        finally:
            self._inside.discard(id(value))

    def _compound(self, value: Any, depth: int) -> str:
        """The description of an object that contains other objects."""
        kind, inner = type(value), partial(self._text, depth=depth)
        for known, names in _CALLABLES.items():
            if isinstance(value, known):
                return ",".join(inner(getattr(value, name)) for name in names)
        if isinstance(value, dict):
            items = [f"{inner(k)}:{inner(x)}" for k, x in value.items()]
            return f"{{{','.join(items)}}}" if items else ""
        if isinstance(value, list | tuple | set | frozenset):
            texts = map(inner, value)
            unordered = isinstance(value, set | frozenset)
            return f"[{','.join(sorted(texts) if unordered else texts)}]" if value else ""
        if _is_of(kind, *_STATELESS):
            return _name(kind)
        if _is_of(kind, *_KNOWN) or any("__slots__" in vars(base) for base in kind.__mro__[:-1]):
            return self._not_known(value)
        code = [inner(x) for x in vars(kind).values() if type(x) is FunctionType]
        return f"{_name(kind)}({inner(vars(value))}){code}"

    def _not_known(self, value: Any) -> str:
        self._unknown = _name(type(value))
        return ""

    def _function(self, function: FunctionType) -> str:
        if _is_of(function, *_KNOWN):
            return _name(function)
        if id(function) not in self._texts:
            self._texts[id(function)] = _name(function)  # in case it is recursive
            code, names = _compiled(function.__code__)
            space = function.__globals__
            imported = [x for name in names if isinstance(x := space.get(name), ModuleType)]
            spaces = [space, *[vars(x) for x in imported if not _is_of(x, *_KNOWN)]]
            parts = [code, *map(self._reference, _bound(function))]
            for name in names:
                for owner in spaces:
                    if name in owner:
                        self._held.append((owner, name, owner[name]))
                        parts.append(f"{name}={self._reference(owner[name])}")
                parts.append(self._called(name))
            digest = hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()
            self._texts[id(function)] = f"{_name(function)}#{digest[:16]}"
        return self._texts[id(function)]

    def _reference(self, value: Any) -> str:
        """The description of an object to which a function refers. Collections are described only
        if they are lists or tuples of plain values, because registries grow while programs run."""
        if isinstance(value, tuple | list) and all(isinstance(x, _PLAIN) for x in value):
            return repr(value)
        if isinstance(value, type) and not _is_of(value, *_KNOWN, "transformers"):
            members = [x for x in vars(value).values() if isinstance(x, (FunctionType, *_PLAIN))]
            return f"{_name(value)}{[self._text(x) for x in members]}"
        known = isinstance(value, (*_PLAIN, FunctionType, MethodType, partial, Tensor))
        return self._text(value) if known else _name(type(value))


def _bound(function: FunctionType) -> list[Any]:
    """The default values and closure variables of a function."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is empty
            found.append(cell.cell_contents)
    return found


def _is_config(value: Any) -> bool:
    """Whether a value is a transformers config; the model's config is in the key already."""
    return any(base.__name__ == "PreTrainedConfig" for base in type(value).__mro__)


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and is_plain(x)


def _getters(
    entries: Iterable[tuple[Any, str, Any]], getter: Callable[..., Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """From triples (owner, name, value): the distinct owners; for each, a getter that returns a
    tuple of its values; and the values of all owners in order."""
    known: dict[int, tuple[Any, dict[str, Any]]] = {}
    for owner, name, value in entries:
        known.setdefault(id(owner), (owner, {}))[1][name] = value
    owners = [owner for owner, _ in known.values()]
    # With two names or more, getters return tuples.
    getters = [
        getter(*names, *([*names] if len(names) == 1 else [])) for _, names in known.values()
    ]
    return owners, getters, [*_gotten(getters, owners)]


def _gotten(getters: Iterable[Any], owners: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(call, getters, owners))


def _hooked_everywhere() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _is_ours(value: Any) -> bool:
    return _is_of(value.func if type(value) is partial else value, "kvkeep")


def _is_of(value: Any, *packages: str) -> bool:
    """Whether a class, function or module, or the class of another object, is defined in one of
    these packages."""
    named = _named(value)
    defined = named.__name__ if isinstance(named, ModuleType) else named.__module__
    return str(defined).partition(".")[0] in packages


def _name(value: Any) -> str:
    """The name of a class, function or module, or of the class of another object."""
    named = _named(value)
    is_module = isinstance(named, ModuleType)
    return named.__name__ if is_module else f"{named.__module__}.{named.__qualname__}"


def _named(value: Any) -> Any:
    """A class, function or module itself; the class of another object."""
    known = isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType)
    return value if known else type(value)


def _layout(x: Tensor) -> tuple[list[int], list[int], torch.dtype]:
    return [*x.shape], [*x.stride()] if x.layout is torch.strided else [], x.dtype


def _compiled(code: CodeType) -> tuple[str, list[str]]:
    """The description of a code object, and the names that it and the code objects in it use."""
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


@cache
def _versions() -> list[str]:
    # During development, kvkeep's code changes while its version number stays.
    source, root = hashlib.sha256(), Path(__file__).parents[2]
    for file in sorted([*root.glob("*.py"), *root.glob("[agh]*/**/*.py")]):  # attention, graph, hf
        source.update(file.read_bytes())
    versions = (__version__, torch.__version__, transformers.__version__)
    return [*map(str, versions), source.hexdigest()]


def _processor() -> list[str]:
    """A description of the processor's instruction set."""
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), _flags()]


@cache
def _flags() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
