"""The kind of adapter that each model library has."""

from __future__ import annotations

from importlib import import_module

from kvkeep.finetune.lora import Lora
from kvkeep.finetune.trained import Trained
from kvkeep.host import Host

_OWN = {"LitGPT": ("kvkeep.finetune.litgpt_lora", "LitGPTLora")}
"""A library with adapters of its own -> the module and name of their `Trained`."""


def lora_of(host: Host) -> Trained:
    """LoRA for a model: of its library, or PEFT's."""
    if host.library not in _OWN:
        return Lora()
    module, name = _OWN[host.library]
    found: Trained = getattr(import_module(module), name)()
    return found
