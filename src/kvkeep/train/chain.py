"""Context parallelism: several processes share a text, each computing some of its chunks.

The processes form a chain in the order of the chunks. Each process sends a layer's slots to the
next process; in the backward, the gradients of these slots come back. So every policy and codec
works as in one process, and the processes compute different layers at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kvkeep.errors import ShapeError, StateError
from kvkeep.train.autograd import sum_gradients
from kvkeep.train.messages import Message, empty
from kvkeep.train.together import together

Group = dist.ProcessGroup


class Chain:
    """This process and its neighbours.

    Args:
        group: processes that share a text; None: this process has the whole text.
        model: tensors go to its device.
        input_ids: the text, (B, T).

    Raises:
        StateError: this process is not in the group; or the model is on several devices, or sharded
            over the group by FSDP2.
        ShapeError: the processes have different texts.
    """

    def __init__(self, group: Group | None, model: nn.Module, input_ids: Tensor) -> None:
        self._group = group
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise StateError(
                f"this process is not in the group of {len(self._ranks)} that shares the text; "
                "give each process the group to which it belongs"
            )
        self.device = next(model.parameters()).device
        gloo = group is not None and dist.get_backend(group) == "gloo"
        self._carrier = torch.device("cpu") if gloo else self.device
        if group is not None:
            _require_whole(model, set(self._ranks))
            self._require_same(input_ids)

    def _require_same(self, input_ids: Tensor) -> None:
        # NCCL also requires all processes of a group to take part in its first exchange.
        text = f"{tuple(input_ids.shape)} ".encode() + input_ids.cpu().numpy().tobytes()
        own = torch.tensor([xxhash.xxh3_64_intdigest(text) >> 1], device=self._carrier)
        each = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(each, own, group=self._group)
        if any(bool(x != own) for x in each):
            raise ShapeError(
                f"the processes that share a text were given different texts, this process texts "
                f"of shape {tuple(input_ids.shape)}; give all processes the same texts, in the "
                "same order"
            )

    def __len__(self) -> int:
        return len(self._ranks)

    def share(self, chunks: int) -> range:
        """Divide `chunks` chunks among the processes, and set this process's neighbours. Return the
        indices of its chunks. With fewer chunks than processes, the last processes get none."""
        count = min(len(self), chunks)
        begins = [index * chunks // count for index in range(count + 1)]
        if self.rank >= count:
            self.behind = 0
            self._before = self._after = None
            return range(0)
        self.behind = count - 1 - self.rank
        """Number of processes with later chunks."""
        self._before = self._ranks[self.rank - 1] if self.rank else None
        self._after = self._ranks[self.rank + 1] if self.behind else None
        return range(begins[self.rank], begins[self.rank + 1])

    @property
    def first(self) -> bool:
        """Whether this process has the first chunks."""
        return self._before is None

    def to_next(self, message: Message) -> None:
        """Send a message to the process with the following chunks."""
        self._exchange(self._after, message, False)

    def from_previous(self) -> Message:
        """Receive a message from the process with the preceding chunks."""
        received = self._exchange(self._before, None, True)
        assert received is not None
        return received

    def swap_with_next(self, message: Message | None) -> Message:
        """Send a message, unless it is None, to the next process, and receive one."""
        received = self._exchange(self._after, message, True)
        assert received is not None
        return received

    def swap_with_previous(self, message: Message, expects: bool) -> Message | None:
        """Send a message to the previous process, and receive one if `expects`."""
        return self._exchange(self._before, message, expects)

    def _exchange(self, peer: int | None, message: Message | None, expects: bool) -> Message | None:
        """Send and receive at the same time, so that two processes that exchange messages do not
        deadlock."""
        assert peer is not None
        head = [] if message is None else [message.head]
        sizes = [torch.tensor([len(x)]) for x in head]
        sizes = self._swap(peer, sizes, [empty(1, "int64")] * expects)
        heads = self._swap(peer, head, [empty(int(x), "uint8") for x in sizes])
        awaited = [Message.described(x) for x in heads]
        given = [] if message is None else message.data
        taken = self._swap(peer, given, [x for one in awaited for x in one.data])
        return next((one.filled(x.to(self.device) for x in taken) for one in awaited), None)

    def _swap(self, peer: int, given: Iterable[Tensor], like: Iterable[Tensor]) -> list[Tensor]:
        """Send tensors, and receive tensors of the shapes and dtypes of `like`."""
        sent = [x.detach().to(self._carrier).contiguous() for x in given]
        taken = [torch.empty_like(x, device=self._carrier) for x in like]
        work = [dist.P2POp(dist.isend, _bytes(x), peer, self._group) for x in sent if x.numel()]
        work += [dist.P2POp(dist.irecv, _bytes(x), peer, self._group) for x in taken if x.numel()]
        for one in dist.batch_isend_irecv(work) if work else ():
            one.wait()
        return taken

    def agreed(self, number: int) -> int:
        """The first process's `number`, in all processes."""
        if self._group is None:
            return number
        x = torch.tensor([number], device=self._carrier)
        dist.broadcast(x, self._ranks[0], self._group)
        return int(x)

    def together(self) -> AbstractContextManager[None]:
        """A context whose errors are raised in all processes; see `together`."""
        return together(self._group, self._carrier)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a number over the processes, in float64 if there are several."""
        if self._group is None:
            return x
        x = x.to(self._carrier, torch.float64)
        dist.all_reduce(x, group=self._group)
        return x.to(self.device)

    @contextmanager
    def summed(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A context in which each process computes its part of the gradients. At its end the parts
        are summed, so each process has the full gradients. The previous contents of `.grad`, equal
        in all processes, are added once."""
        if self._group is None:
            yield
            return
        trained = [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]
        earlier = [p.grad for p in trained]
        if self.rank:
            for p in trained:
                p.grad = None
        try:
            yield
        except BaseException:
            if self.rank:
                for p, gradient in zip(trained, earlier, strict=True):
                    p.grad = gradient
            raise
        del earlier
        sum_gradients(trained, self._group, self._carrier)


def _require_whole(model: nn.Module, ranks: set[int]) -> None:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise StateError(
            f"the model is on {len(devices)} devices, but a process that shares a text receives "
            "slots on one device; move the model to one device, or give no group"
        )
    for p in model.parameters():
        if isinstance(p, DTensor) and len(ranks & set(p.device_mesh.mesh.flatten().tolist())) > 1:
            raise StateError(
                "the model is sharded over the processes that share the text, but these compute "
                "different layers at the same time; shard it over the other dimension of a mesh"
            )


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
