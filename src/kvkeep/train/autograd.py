"""torch's backward, as training calls it: in the forward's dtypes, and under FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def accumulate(ends: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """`torch.autograd.backward` outside of autocast: it runs in the dtypes of the forward."""
    with torch.autocast(ends[0].device.type, enabled=False):
        torch.autograd.backward(ends, gradients)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module over processes."""
    return isinstance(module, FSDPModule)


def reduces(module: nn.Module, on: bool, *, recurse: bool = True) -> None:
    """Set whether a backward through an FSDP2 module reduces its gradients over the processes that
    share it, or leaves that to a later backward. Other modules are unchanged."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on, recurse=recurse)


def average(model: nn.Module) -> None:
    """Average the gradients of a DistributedDataParallel over its processes, as its own backward
    does; other models are unchanged."""
    if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
        return
    for p in model.parameters():
        if p.requires_grad:  # all processes must reduce the same parameters, or they deadlock
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(p.grad, group=model.process_group)
            p.grad /= torch.distributed.get_world_size(model.process_group)
