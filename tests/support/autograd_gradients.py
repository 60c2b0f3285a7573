"""Gradients by plain autograd, with everything in memory: what `kvkeep.train` is held to, and the
models and texts of its tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, pad

import kvkeep
from kvkeep.train import replaying
from support.tiny_models import tiny


def model_of(family: str, dtype: torch.dtype = torch.float64, **overrides: Any):
    """Its loss is that of a model which knows little, so that no gradient vanishes."""
    model = tiny(family, **overrides).to(dtype)
    for weight in model.parameters():
        weight.data.mul_(0.5)
    return model


def adapted(model: Any, **options: Any):
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradients of lora_A
            weight.data.normal_(0, 0.1)
    return model


def texts(rows: int, tokens: int, *, pads: tuple[int, ...] = (), side: str = "left", seed: int = 0):
    """ids, labels and mask (None without padding) of random texts."""
    ids = torch.randint(2, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, slice(0, count) if side == "left" else slice(tokens - count, tokens)] = 0
    return ids, ids.masked_fill(mask == 0, -100), mask if pads else None


def shifted(labels: Tensor) -> Tensor:
    return pad(labels[:, 1:], (0, 1), value=-100)


def unrolled(
    model: Any,
    ids: Tensor,
    labels: Tensor,
    spec: str,
    chunk: int,
    mask: Tensor | None = None,
    decisions: Any = None,
) -> Tensor:
    """The loss, whose graph is the cached forward of all chunks; it decides without `decisions`."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Recurrent states are changed in place, so what autograd saves of them must be copies.
    with kvkeep.attach(inner), saved_tensors_hooks(torch.clone, lambda x: x):
        if decisions is None:
            cache = kvkeep.Cache(inner, f"{spec}@concat")
        else:
            cache = replaying(inner, spec, decisions)
        total = torch.zeros((), dtype=inner.dtype)
        for start in range(0, ids.shape[1], chunk):
            stop = min(start + chunk, ids.shape[1])
            logits = inner(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
            ).logits
            targets = shifted(labels)[:, start:stop]
            total = total + cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
        return total / (shifted(labels) != -100).sum()


def ordinary(model: Any, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """The loss of one forward without a cache."""
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), shifted(labels).flatten(), ignore_index=-100)


@contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """A context in which a model's code computes in float64 where it asks for float32, as within
    recurrences."""
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    files = {file for file in files if file.__name__.startswith("transformers.models.")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        for file in files:
            patch.setattr(file, "torch", _Float64("torch"))
        yield


class _Float64(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


def gradients(model: Any) -> Tensor:
    """All gradients as one vector; the model has none afterwards."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    model.zero_grad(set_to_none=True)
    return torch.cat([x.flatten() for x in found])


def error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, Euclidean."""
    assert expected.norm() > 0
    return float((found.double() - expected.double()).norm() / expected.double().norm())
