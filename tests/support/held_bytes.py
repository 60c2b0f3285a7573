"""The most bytes that tensors hold at once, of those that torch's operations make."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """A context that follows the storage of every result for as long as anything holds it: a
    variable, or what autograd saved. `most` is the peak of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        gone = [key for key, (storage, _) in self._held.items() if storage.expired()]
        for key in gone:
            del self._held[key]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))
        return found
