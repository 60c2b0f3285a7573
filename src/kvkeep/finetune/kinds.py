"""The kind of adapter that each model library has."""

from __future__ import annotations

from importlib import import_module

from kvkeep.finetune.trained import Trained
from kvkeep.host import Host

_PEFT = "kvkeep.finetune.lora", "Lora"
_OF = {"LitGPT": ("kvkeep.finetune.litgpt_lora", "LitGPTLora")}
"""A library's name -> the module and name of its `Trained`, where it is not PEFT's."""


def lora_of(host: Host) -> Trained:
    """LoRA for a model."""
    module, name = _OF.get(host.library, _PEFT)
    found: Trained = getattr(import_module(module), name)()
    return found
