"""PEFT adapters: which are active in a forward, and where an activated LoRA (aLoRA) starts."""

from __future__ import annotations

import inspect
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import UnsupportedError
from kvkeep.host.cache import Activation

_OFFSET: ContextVar[int | None] = ContextVar("offset", default=None)
"""Number of last tokens in this thread's forward that an activated adapter computes."""

NEVER = 1 << 40
"""Start index that means the activated adapter is not invoked."""


@dataclass(frozen=True)
class InvokedAdapter:
    """An adapter that is active from its invocation tokens in a prompt on: PEFT's activated LoRA.
    The base model computes the tokens before the invocation.

    Source: aLoRA (arXiv 2504.12397).
    """

    name: str
    invocation: tuple[int, ...]

    def start(self, prompt: Tensor) -> int:
        """The index of the last invocation in a prompt, (n,); `NEVER` if there is none."""
        n = len(self.invocation)
        if len(prompt) < n:
            return NEVER
        same = prompt.unfold(0, n, 1).eq(torch.tensor(self.invocation)).all(dim=1)
        found = same.nonzero()
        return int(found[-1]) if len(found) else NEVER


def adapter_layers(model: nn.Module) -> list[Any]:
    """The model's layers that have adapters."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return []
    return [module for module in model.modules() if isinstance(module, peft.BaseTunerLayer)]


def active_adapters(model: nn.Module) -> tuple[set[str], dict[str, list[float]]]:
    """PEFT's names for the submodules that adapters add to layers; and the active adapters with
    their scale in each layer."""
    layers, active = {"modules_to_save"}, dict[str, list[float]]()
    for module in adapter_layers(model):
        layers |= set(module.adapter_layer_names)
        for name in () if module.disable_adapters else module.active_adapters:
            scales = getattr(module, "scaling", {})  # some kinds of adapters have no scale
            active.setdefault(name, []).append(float(scales.get(name, 1.0)))
    return layers, active


def invoked_adapter(model: nn.Module) -> InvokedAdapter | None:
    """The activated adapter (aLoRA) that is active in the forward; None if there is none.

    Raises:
        UnsupportedError: other adapters or modules are active too, so the base model alone does not
            compute the tokens before the invocation.
    """
    _, active = active_adapters(model)
    configs: Any = getattr(model, "peft_config", {})
    invoked = {
        name: tuple(tokens)
        for name in active
        if (tokens := getattr(configs.get(name), "alora_invocation_tokens", None))
    }
    if not invoked:
        return None
    auxiliary: Any = sys.modules["peft.utils.other"]
    others = [m for m in model.modules() if isinstance(m, auxiliary.AuxiliaryTrainingWrapper)]
    if len(active) > 1 or others:
        raise UnsupportedError(
            f"an activated adapter is active together with other adapters ({sorted(active)}) or "
            f"with saved modules ({len(others)}), so the base model alone does not compute the "
            "tokens before the invocation; use the activated adapter by itself"
        )
    ((name, tokens),) = invoked.items()
    return InvokedAdapter(name, tokens)


def names_adapters(model: nn.Module) -> bool:
    """Whether this call assigns adapters to rows by name (PEFT's `adapter_names=`)."""
    return any(
        "adapter_names" in getattr(hook, "keywords", {})
        for module in adapter_layers(model)
        for hook in module._forward_pre_hooks.values()
    )


def learned_tokens(model: nn.Module) -> int:
    """Number of learned tokens, or learned keys and values, that PEFT puts before a prompt."""
    config = getattr(prompt_learner(model), "active_peft_config", None)
    return getattr(config, "num_virtual_tokens", 0)


def prompt_learner(model: nn.Module) -> Any:
    """The PEFT model that prepares the inputs of `generate()` and puts learned tokens, or learned
    keys and values, before a prompt; None if there is none."""
    prepared: Any = model.__dict__.get("prepare_inputs_for_generation")
    learner = getattr(inspect.unwrap(prepared), "__self__", None)
    config = getattr(learner, "active_peft_config", None)
    return learner if getattr(config, "is_prompt_learning", False) else None


def activate(model: Any, activation: Activation | None, position: Tensor) -> None:
    """Make an activated adapter compute the tokens from `activation.start` on in this thread's next
    forward, of tokens at `position`, (n,). With None, PEFT decides.

    PEFT counts from the end of a forward's tokens, and ignores the tokens that a cache holds.
    """
    if activation is None:
        _OFFSET.set(None)
        return
    _OFFSET.set(int((position >= activation.start).sum()))
    for layer in adapter_layers(model):
        hooks = layer._forward_pre_hooks
        if (
            not hooks or next(reversed(hooks.values())) is not _set_offsets
        ):  # must run after PEFT's hooks
            _remove_hook(layer)
            layer.register_forward_pre_hook(_set_offsets, with_kwargs=True)


def deactivate(model: nn.Module) -> None:
    """Undo what `activate` did to a model."""
    for layer in adapter_layers(model):
        _remove_hook(layer)


def _set_offsets(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    offset = _OFFSET.get()
    return None if offset is None else (args, kwargs | {"alora_offsets": [offset] * len(args[0])})


def _remove_hook(layer: nn.Module) -> None:
    for number in [n for n, hook in layer._forward_pre_hooks.items() if hook is _set_offsets]:
        del layer._forward_pre_hooks[number]
        layer._forward_pre_hooks_with_kwargs.pop(number, None)
