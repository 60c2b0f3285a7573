"""Dtypes and devices by name."""

from __future__ import annotations

import torch

from kvkeep.errors import ModelError

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name such as float32 or bf16.

    Raises:
        ModelError: there is no such dtype.
    """
    if name not in _DTYPES:
        raise ModelError(f"no dtype {name!r}; there is auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def device_named(name: str | None) -> torch.device:
    """The torch device of a name; None: the accelerator if there is one, otherwise the CPU.

    Raises:
        ModelError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        there = "cpu" if accelerator is None else f"cpu, {accelerator}"
        raise ModelError(f"no device {name!r} here; there is {there}") from error


def dtype_on(device: str | None, dtype: str = "auto") -> tuple[torch.dtype, torch.device]:
    """The dtype and the device for loading a model, by name. The dtype "auto" is float32 on the CPU
    and bfloat16 elsewhere.

    Raises:
        ModelError: the dtype does not exist, or this machine has no such device.
    """
    named = None if dtype == "auto" else dtype_named(dtype)
    place = device_named(device)
    return named or (torch.float32 if place.type == "cpu" else torch.bfloat16), place
