"""The attention of a module whose forward kvkeep replaces, because the module does not give its
cache's keys and values to the attention function."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Output = tuple[Tensor, Tensor | None]


class Attention(NamedTuple):
    """The attention of a module in a forward.

    Args:
        name: the attention implementation.
        module: the module.
        cache: the cache that gets new keys and values; None: they come from the cache already.
        place: the layer's index in the model; None: the module's `layer_idx`.
    """

    name: str
    module: Any
    cache: Any = None
    place: int | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give new keys and values, (B, H, n, D) each, to the cache; returns its result."""
        place = self.module.layer_idx if self.place is None else self.place
        found: tuple[Tensor, Tensor] = self.cache.update(k, v, place)
        return found

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        scaling: float,
        dropout: nn.Dropout | float = 0.0,
        **options: Any,
    ) -> Output:
        """Attention to the cache's slots and to k and v, (B, n, Hq, D), and its weights if they
        were requested. q, k, v: (B, H, n, D). `options`: further arguments of the attention
        function."""
        if self.cache is not None:
            k, v = self.update(k, v)
        share = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        share = share if self.module.training else 0.0
        run: Any = ALL_ATTENTION_FUNCTIONS[self.name]
        found: Output = run(self.module, q, k, v, mask, scaling=scaling, dropout=share, **options)
        return found

    @property
    def updated(self) -> Attention:
        """The same attention to keys and values that come from the cache."""
        return self._replace(cache=None)
