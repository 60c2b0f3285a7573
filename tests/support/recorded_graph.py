"""A CUDA graph's stand-in on the CPU: recorded operations, executed again on the same tensors."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class RecordedGraph(TorchDispatchMode):
    """As a context manager it records the operations that run. `replay` executes them again:
    numbers that Python computed stay as they were, as in a CUDA graph."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self._calls:
            found = func(*args, **kwargs)
            for mine, new in zip(tree_flatten(out)[0], tree_flatten(found)[0], strict=True):
                if hasattr(mine, "copy_") and mine.data_ptr() != new.data_ptr():  # no view
                    mine.copy_(new)
