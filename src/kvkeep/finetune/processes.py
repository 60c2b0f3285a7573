"""The processes of a run: division of work, reductions, sharding, and a common end.

The processes divide each step's batches. Each process has the whole model and gradients are summed,
or FSDP2 shards weights, gradients and optimizer state over the processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Shard

from kvkeep.files import tensor_file
from kvkeep.finetune.data import Batch, equalised
from kvkeep.finetune.options import OptionError, Options
from kvkeep.host import host_of
from kvkeep.train.autograd import sum_gradients
from kvkeep.train.together import together


class Processes:
    """This process and the other processes of `torch.distributed`, if it is initialised.

    Args:
        device: this process's device.
        options: the run's options: number of processes per text (context parallelism), host memory
            for a sharded model, and batches per step.

    Raises:
        OptionError: the number of processes does not fit, or offloading is impossible.

    Attributes:
        count: number of batches computed at the same time.
        group: the processes that share this process's texts; None: no other process does.
        sharded: whether FSDP2 shards the model; see `shard`.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        here, context = dist.is_initialized(), options.context_parallel
        if options.offload and device.type == "cpu":
            what = "nothing can be offloaded from the CPU"
            raise OptionError(f"{what}, whose memory holds everything; leave out --offload")
        if options.offload and not here:
            what = "offloading is FSDP2's, which needs torch.distributed"
            raise OptionError(f"{what}; call init_process_group first, also for one process")
        size, self._rank = (dist.get_world_size(), dist.get_rank()) if here else (1, 0)
        if size % context:
            what = f"{context} processes for each text, but there are {size}"
            remedy = f"start a multiple of {context}, or choose another --context-parallel"
            raise OptionError(f"{what}; {remedy}")
        self.count, self._place = size // context, self._rank // context
        if self.count > options.accumulate:
            most = options.accumulate
            what = f"{self.count} processes with texts of their own, but a step has {most} batches"
            remedy = f"start at most {most}, or use --context-parallel or --accumulate {self.count}"
            raise OptionError(f"{what}; {remedy}")
        self.device, self.sharded, self._offload = device, False, options.offload
        self._size = size
        self._data: Any = None  # group of the processes with other texts
        self.group: dist.ProcessGroup | None = None
        if here:
            mesh = init_device_mesh(
                device.type, (self.count, context), mesh_dim_names=("data", "context")
            )
            self._data = mesh["data"]
            self.group = mesh.get_group("context") if context > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this process reports and writes files."""
        return not self._rank

    def share(self, batches: list[Batch]) -> Iterator[tuple[int, Batch]]:
        """The batches that this process computes, with their indices.

        All processes of a sharded model must gather its layers equally often. So batches computed
        at the same time have equal shapes, and a process may receive a batch without labels.
        """
        for start in range(0, len(batches), self.count):
            some = batches[start : start + self.count]
            if self.sharded:
                some = equalised(some, self.count)
            if self._place < len(some):
                yield start + self._place, some[self._place]

    def shard(self, model: Any) -> None:
        """Shard a model's parameters by FSDP2, layer by layer. Gradients and optimizer state are
        sharded in the same way, on the parameters' device."""
        policy = CPUOffloadPolicy() if self._offload else OffloadPolicy()
        probe = torch.zeros(1, 1, dtype=torch.int64, device=host_of(model).device)
        with host_of(model).layerwise(probe, None) as decoder:
            parts = [*decoder.layers, decoder.model]
        for part in parts:
            fully_shard(part, mesh=self._data, offload_policy=policy)
        self.sharded = True

    @property
    def scale(self) -> float:
        """The factor of a process's gradients that makes FSDP2's average the sum over all texts."""
        return float(self.count) if self.sharded else 1.0

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of an unsharded model over the processes."""
        if self.sharded or self.count == 1:
            return
        sum_gradients(parameters, self._data.get_group())

    def sum(self, number: float, *, of_all: bool = False) -> float:
        """The sum of a number over the processes with other texts, or over all processes."""
        if (self._size if of_all else self.count) == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, group=None if of_all else self._data.get_group())
        return float(found)

    def together(self) -> AbstractContextManager[None]:
        """A context in which an error of one process raises in all; see `kvkeep.train.together`."""
        return together(dist.group.WORLD if self._size > 1 else None, self.device)

    def apart(self) -> AbstractContextManager[None]:
        """`together` for processes that compute separate batches. A process that fails in a joint
        computation cannot wait for the other processes, and must exit."""
        joint = self.sharded or self.group is not None
        return nullcontext() if joint else self.together()

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write a safetensors file: all processes gather each tensor, the leading process writes
        it. Only one whole tensor is in memory at a time.

        torch.distributed.checkpoint is not used, because it unpickles its metadata.

        Raises:
            OSError: the file cannot be written; in the leading process only.
        """
        left = iter(tensor_file.order(tensors))

        def one(x: Tensor) -> Tensor:
            next(left)
            return full_tensor(x)

        try:
            if self.leads:
                tensor_file.write(path, tensors, metadata, sync=False, whole=one)
        finally:
            for name in left:  # also after a failed write, which other processes do not know
                full_tensor(tensors[name])


def full_tensor(x: Tensor) -> Tensor:
    """A sharded tensor gathered in each process; other tensors are unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def fill(x: Tensor, file: Any, name: str) -> None:
    """Fill a tensor from a safetensors file (`safe_open`). Of a sharded tensor, only this process's
    shard is read."""
    with torch.no_grad():
        if not isinstance(x, DTensor):
            x.copy_(file.get_tensor(name))
            return
        (placement,) = x.placements
        assert placement == Shard(0)  # divided as by torch.chunk
        most = -(-x.shape[0] // x.device_mesh.size())
        own = x.to_local()
        start = min(x.device_mesh.get_local_rank() * most, x.shape[0])
        if len(own):
            own.copy_(file.get_slice(name)[start : start + len(own)])


@contextmanager
def launched(device: torch.device, *, offload: bool = False) -> Iterator[torch.device]:
    """Join the processes that torchrun started, if any; yields this process's device.

    If one process fails, it alone reports the reason; the other processes exit quietly, and
    torchrun ends processes that wait for it.

    Args:
        device: where to compute; of several accelerators, each process takes its own.
        offload: FSDP2 is needed, which requires a process group, even of one process.
    """
    several = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not several and not offload:
        yield device
        return
    backend = "gloo"
    if device.type != "cpu":
        if several or device.index is None:
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    alone: Any = dist.HashStore  # type: ignore[attr-defined]
    store, rank, size = next(rendezvous("env://")) if several else (alone(), 0, 1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield device
    except Exception:
        if store.add("kvkeep/failed", 1) > 1:
            raise SystemExit(2) from None
        raise
    finally:
        if not several:
            dist.destroy_process_group()
