"""Fingerprints: hashes of everything that a model's keys and values depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import xxhash
from torch import Tensor, nn

from kvkeep.host.adapters import active_adapters, adapter_layers
from kvkeep.host.hooks import foreign_hooks
from kvkeep.host.tensors import RESULT_SUFFIX, Modules, buffers, weights, writes_its_state

_IRRELEVANT_ATTRIBUTES = {
    "gradient_checkpointing",
    "is_quantized",
    "max_position_embeddings",
    "original_max_seq_len",
    "padding_idx",
    "training",
}
"""Attributes of modules that do not affect the result."""

_Tensors = Sequence[tuple[str, Tensor]]

LIBRARY = "library"
"""The part that names the model's library; absent for transformers."""

HOOKS = "hooks"
"""The part that lists foreign hooks, if there are any; see `kvkeep.host.hooks`."""

_NUMBERS = {bool, int, float, torch.dtype}
_SAMPLE = 16  # most elements sampled from a tensor
_COMPARED = 64  # fewest elements of a larger tensor that `sampled` hashes
_SHOWN = 60  # most characters shown of a field's value

_settled: WeakSet[nn.Module] = WeakSet()
_known: WeakKeyDictionary[nn.Module, tuple[object, dict[str, str]]] = WeakKeyDictionary()


def fingerprint_of(
    model: nn.Module,
    described: Mapping[str, str],
    tokenizer: Any = None,
    *,
    glance: bool = False,
    changing: bool = False,
) -> dict[str, str]:
    """Hashes and descriptions of everything that a model's keys and values depend on. Hashing reads
    several gigabytes of weights per second.

    Args:
        described: further parts, text by name, such as the model's config.
        tokenizer: the model's tokenizer, to hash too.
        glance: skip reading weights that appear unchanged: the same tensors, with the same version
            counters in torch, and the same values in one element of each row of an embedding and in
            16 elements of every other tensor. A write through `.data` to other elements is missed
            until a call without `glance`, which reads everything.
        changing: whether rotary frequencies depend on the length of the text; their buffers are
            then excluded.

    Returns:
        As hashes: `weights` (parameters, persistent buffers and further tensors of quantised
            layers), `buffers` (non-persistent buffers, such as rotary frequencies), `modules`
            (classes and numeric attributes, such as a norm's epsilon) and `adapter` ("none", or the
            active adapters). As text: `dtype`, `described`, `hooks` (functions that the user has
            set in the model; they differ between models and processes) and `tokenizer` (hashes of
            its parts). `hooks` and `tokenizer` are absent if there are none.

    Raises:
        UnsupportedError: a weight cannot be read: it is on the meta device or of an unknown kind.
    """
    found = {**_of_tensors(model, glance=glance, changing=changing), **described}
    hooks = foreign_hooks(model)
    if hooks:
        found[HOOKS] = as_text(hooks)
    if tokenizer is not None:
        found["tokenizer"] = as_text(_hashes_of_tokenizer(tokenizer))
    return found


def sampled(model: nn.Module) -> str:
    """A hash that identifies the weights a policy was calibrated for. It reads at least 64 elements
    of each weight, rounded to bfloat16, so it is the same in float32 and bfloat16. Adapter weights
    are excluded."""
    layers, _ = active_adapters(model)
    found = xxhash.xxh3_128()
    modules = list(model.named_modules())
    _settle(model, modules)
    with torch._C.DisableTorchFunctionSubclass():
        plain = [(_plain(name), x) for name, x in weights(modules)]
        for name, x in sorted(plain, key=lambda named: named[0]):
            if set(name.split(".")) & layers:
                continue
            flat = Tensor.detach(x).flatten()
            few = flat[:: max(1, flat.numel() // _COMPARED)]
            few = few.bfloat16() if few.is_floating_point() else few
            few = few.contiguous()
            found.update(f"{name} {tuple(x.shape)}\n".encode())
            found.update(few.cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the differences of two fingerprints; tokenizers are compared if both contain one."""
    found = []
    for part in sorted(then.keys() | now.keys()):
        if part == HOOKS:
            found += _difference(part, then.get(part, "{}"), now.get(part, "{}"))
        elif part in then and part in now:
            found += _difference(part, then[part], now[part])
        elif part != "tokenizer":
            what = "not recorded then" if part not in then else "recorded then, unknown now"
            found.append(f"{part}: {what}")
    return found


def _difference(part: str, then: str, now: str) -> list[str]:
    """Describe how a part of a fingerprint differs, field by field if it is text."""
    if then == now:
        return []
    if part == "dtype":
        return [f"dtype was {then}, is {now}"]
    try:
        old, new = json.loads(then), json.loads(now)
    except (ValueError, RecursionError):  # the recorded part may be any text
        old = new = None
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [f"{part} {'differ' if part.endswith('s') else 'differs'}"]
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    if part == "tokenizer":
        return [f"tokenizer differs in {', '.join(names)}"]
    return [f"{part}.{name} was {_short(old, name)}, is {_short(new, name)}" for name in names]


def _short(fields: Mapping[str, Any], name: str) -> str:
    text = json.dumps(fields[name]) if name in fields else "not set"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _of_tensors(model: nn.Module, *, glance: bool, changing: bool) -> dict[str, str]:
    """The parts of a fingerprint that cover a model's tensors and modules."""
    modules = list(model.named_modules())
    _settle(model, modules)
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may override reads
        tensors = weights(modules), buffers(modules, changing=changing)
        stamp = _stamp(model, modules, *tensors)
        known = _known.get(model)
        if not glance or known is None or known[0] != stamp:
            known = _known[model] = (stamp, _read(model, modules, *tensors))
    return dict(known[1])


def _settle(model: nn.Module, modules: Modules) -> None:
    """Feed one token to a model whose layers may rearrange their weights in the first forward, as
    bitsandbytes' 4-bit layers do on a CPU, so that the fingerprint does not change later."""
    if model in _settled or model.training:
        return
    _settled.add(model)
    if any(writes_its_state(module) for _, module in modules):
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device))


def _stamp(model: nn.Module, modules: Modules, *read: _Tensors) -> object:
    """A value that changes if a hashed tensor or module changes, as far as a sample can detect."""
    embeddings = {m.weight.data_ptr() for _, m in modules if isinstance(m, nn.Embedding)}
    tensors, samples = [], dict[tuple[torch.device, torch.dtype], list[Tensor]]()
    for name, x in chain(*read):
        place = x.data_ptr()
        tensors.append((name, place, 0 if x.is_inference() else x._version, x.shape))
        if place in embeddings:
            sample = Tensor.detach(x)[..., x.shape[-1] // 2].flatten()
        else:
            sample = Tensor.detach(x).flatten()[:: x.numel() // _SAMPLE + 1]
        samples.setdefault((x.device, x.dtype), []).append(sample)
    looks = {
        kind: torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes()
        for kind, parts in samples.items()
    }
    return tensors, looks, active_adapters(model), _numbers(modules)


def _read(model: nn.Module, modules: Modules, *read: _Tensors) -> dict[str, str]:
    hashes = {name: xxhash.xxh3_128() for name in ("weights", "buffers", "modules", "adapter")}
    layers, active = active_adapters(model)
    dtypes = set()
    for kind, tensors in zip(("weights", "buffers"), read, strict=True):
        plain = ((_plain(name), x) for name, x in tensors)
        for name, x in sorted(plain, key=lambda named: named[0]):
            parts = set(name.split("."))
            if not parts & layers:
                _add(hashes[kind], name, x)
                if isinstance(x, nn.Parameter) and x.is_floating_point():
                    dtypes.add(str(x.dtype))
            elif parts & set(active):
                _add(hashes["adapter"], name, x)
    wrapping = set(adapter_layers(model))
    adapters = [(name, module) for name, module in modules if module in wrapping]
    hashes["adapter"].update(json.dumps(active).encode())
    for kind, part in (("modules", _own(model, modules)), ("adapter", adapters)):
        for name, what, numbers in sorted(_numbers(part), key=lambda one: one[:2]):
            hashes[kind].update(f"{name} {what} {sorted(numbers)}\n".encode())
    found = {name: x.hexdigest() for name, x in hashes.items()}
    return found | {"dtype": " ".join(sorted(dtypes))} | ({} if active else {"adapter": "none"})


def _plain(name: str) -> str:
    """A module's or tensor's name in the model without adapters."""
    name = f"{name}.".removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")[:-1]


def _own(model: nn.Module, modules: Modules) -> Modules:
    """The modules of a model without its adapters."""
    added, _ = active_adapters(model)
    wrapping = set(adapter_layers(model))
    found, inside = [], tuple[str, ...]()
    for name, module in modules:
        path = tuple(name.split("."))
        if module in wrapping:
            inside = path
        elif (
            added.isdisjoint(path)
            and not type(module).__module__.startswith("peft.")
            and not (inside and path[: len(inside)] == inside and path[len(inside)] != "base_layer")
        ):
            found.append((name, module))
    return found


def _numbers(modules: Modules) -> list[tuple[str, str, list[tuple[str, Any]]]]:
    """The name, class and numeric attributes of each module."""
    return [
        (
            _plain(module_name),
            type(module).__name__,
            [
                (name, value)
                for name, value in vars(module).items()
                if name[0] != "_"
                and _is_number(value)
                and name not in _IRRELEVANT_ATTRIBUTES
                and not name.endswith(RESULT_SUFFIX)
            ],
        )
        for module_name, module in modules
    ]


def _is_number(value: Any) -> bool:
    kind = type(value)
    return kind in _NUMBERS or (kind in (tuple, list) and all(map(_is_number, value)))


def _add(to: Any, name: str, x: Tensor) -> None:
    to.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
    flat = Tensor.detach(x).cpu().contiguous().reshape(-1)
    if flat.numel():
        to.update(flat.view(torch.uint8).numpy().data)


def as_text(fields: Mapping[str, Any]) -> str:
    """Fields as JSON, sorted by name."""
    return json.dumps(fields, sort_keys=True, default=str)


def _hashes_of_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Hashes of a tokenizer's vocabulary, special tokens and chat template."""
    parts = {
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "special tokens": str(tokenizer.special_tokens_map),
        "chat template": tokenizer.chat_template,
    }
    return {
        name: xxhash.xxh3_128_hexdigest(json.dumps(part).encode()) for name, part in parts.items()
    }
