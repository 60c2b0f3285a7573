"""Calls of torch's backward: outside of autocast, and with FSDP2 and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def accumulate(ends: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """`torch.autograd.backward`, outside of autocast, so that it keeps the forward's dtypes."""
    with torch.autocast(ends[0].device.type, enabled=False):
        torch.autograd.backward(ends, gradients)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module over processes."""
    return isinstance(module, FSDPModule)


def reduces(module: nn.Module, on: bool, *, recurse: bool = True) -> None:
    """Set whether the next backward of an FSDP2 module reduces gradients over the processes;
    False: a later backward does. Any other module is unchanged."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on, recurse=recurse)


def average(model: nn.Module) -> None:
    """Average a DistributedDataParallel model's gradients over its processes, as its own backward
    does; any other model is unchanged."""
    if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    sum_gradients(trained, model.process_group)
    for p in trained:
        assert p.grad is not None
        p.grad /= dist.get_world_size(model.process_group)


def sum_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup,
    carrier: torch.device | None = None,
) -> None:
    """Sum gradients over a group. All processes must pass the same parameters.

    Args:
        carrier: device for exchanging tensors; None: the gradients' own device.
    """
    for p in parameters:  # also without a gradient: all processes must make the same calls
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        whole = own if carrier is None else own.to(carrier)
        dist.all_reduce(whole, group=group)
        own.copy_(whole)
