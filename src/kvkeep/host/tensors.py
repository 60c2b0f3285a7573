"""Read a model's weights and buffers in place.

No method that a library may replace is called: bitsandbytes changes weights in place when a state
dict is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvkeep.errors import UnsupportedError

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their names, from `named_modules`."""

RESULT_SUFFIX = "_cached"
"""Suffix of the names of attributes in which modules store results."""

_RESULTS = {"idx", "subB"}
"""Attributes of bitsandbytes' 8-bit layers that hold the columns of the last call."""

_WRITERS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_DEEPEST = 4  # most levels of nested objects searched for tensors


def weights(modules: Modules) -> list[tuple[str, Tensor]]:
    """The parameters and persistent buffers of modules, and the further tensors of quantised
    modules; each once.

    Raises:
        UnsupportedError: a tensor has no data, or is of an unknown kind.
    """
    seen, found = set(), list[tuple[str, Tensor]]()
    for module_name, module in modules:
        prefix = f"{module_name}." if module_name else ""
        for name, value in (*_named(module), *_beside(module)):
            for inner, x in _dense(prefix + name, value):
                place = (x.data_ptr(), x.shape)
                if place not in seen or not x.numel():
                    seen.add(place)
                    found.append((inner, x))
    return found


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by the names of its state dict; tied tensors
    have several names."""
    return {
        f"{module_name}.{name}" if module_name else name: value
        for module_name, module in model.named_modules(remove_duplicate=False)
        for name, value in _named(module)
    }


def buffers(modules: Modules, *, changing: bool) -> list[tuple[str, Tensor]]:
    """Non-persistent buffers; without rotary frequencies if `changing`.

    Raises:
        UnsupportedError: see `weights`.
    """
    found = list[tuple[str, Tensor]]()
    for module_name, module in modules:
        for name in sorted(module._non_persistent_buffers_set):
            x = module._buffers.get(name)
            moves = changing and name.endswith("inv_freq") and "original" not in name
            if x is not None and not moves and not name.endswith(RESULT_SUFFIX):
                found += _dense(f"{module_name}.{name}", x)
    return found


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module itself."""
    own = {**module._parameters, **module._buffers}
    left_out = module._non_persistent_buffers_set
    return [(name, x) for name, x in own.items() if x is not None and name not in left_out]


def _beside(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a quantised module that are neither parameters nor buffers: in attributes of
    its parameters and buffers, and, if it writes its own state dict, in attributes of the module.
    Names start inside the attribute, because a library may move an object between the two."""
    own = [vars(x) for _, x in _named(module) if not is_traceable_wrapper_subclass(x)]
    held = [(name, x) for named in own for name, x in named.items() if not name.startswith("_")]
    if writes_its_state(module):
        known = {name for name, _ in held}  # bitsandbytes keeps a second, older copy in the module
        held += [
            (name, x)
            for name, x in vars(module).items()
            if name not in known and (not name.startswith("_") or isinstance(x, torch.ScriptObject))
        ]
    return [part for name, x in held for part in _inside(name, x)]


def writes_its_state(module: nn.Module) -> bool:
    """Whether a module may add tensors to a state dict that are neither parameters nor buffers, as
    some libraries' quantised layers do."""
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks) or any(
        getattr(type(module), name) is not getattr(nn.Module, name) for name in _WRITERS
    )


def _inside(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an attribute `name`, with their names. The name of the outermost object is
    left out."""
    parts: Any = ()
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, torch.ScriptObject):
        parts = enumerate(cast(tuple[Any, ...], value.__getstate__()))
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    elif not isinstance(value, nn.Module | type) and not callable(value):
        parts = getattr(value, "__dict__", {}).items()
    for key, part in parts if depth < _DEEPEST else ():
        if key not in _RESULTS:
            yield from _inside(str(key) if depth == 0 else f"{name}.{key}", part, depth + 1)


def _dense(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that make up a tensor.

    Raises:
        UnsupportedError: the value is of an unknown kind, or has no data.
    """
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for inner in value.__tensor_flatten__()[0]:
                part = getattr(value, inner)
                if not isinstance(part, DeviceMesh):  # describes the processes with the other parts
                    yield from _dense(f"{name}.{inner}", part)
        elif value.is_quantized:
            yield f"{name}.codes", value.int_repr()
            if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                scale = torch.tensor(value.q_scale()), torch.tensor(value.q_zero_point())
            else:
                scale = value.q_per_channel_scales(), value.q_per_channel_zero_points()
            yield from ((f"{name}.scale.{index}", x) for index, x in enumerate(scale))
        elif value.is_meta or value.layout != torch.strided:
            raise UnsupportedError(
                f"{name} is a {value.layout} tensor on {value.device}, which cannot be hashed to "
                "identify the model; load the whole model onto a device before using stores or "
                "saved caches"
            )
        else:
            yield name, value
    else:
        raise UnsupportedError(
            f"{name} of the model's state is a {type(value).__name__}, which cannot be hashed to "
            "identify the model; use neither stores nor saved caches with it"
        )
