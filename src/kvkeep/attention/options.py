"""The options of an `attend` call, checked once and passed to the backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvkeep.attention.centre import Centre


class Options(NamedTuple):
    """`scale` multiplies q.k; `softcap` c turns scores x into c tanh(x / c); `sinks` (Hq,): logits.
    `slopes` (Hq,): the bias of each query head, added to scores for each position by which a slot
    follows the query (so a positive slope lowers the scores of older slots); no gradients. `bias`
    (B, Hq, n, E): a query's score of a slot d positions before it increases by bias[..., d], or by
    the last one if d >= E - 1.
    `centre`: the scales and mean keys that all slots' keys lack; see `Centre`.

    `need_mass`: return the mass. It counts the newest `observed` real queries (position >= 0) of
    each row in the chunk; None: all. With `peak` it is the largest weight from any counted query
    and any query head of the group, instead of the sum averaged over the group.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    need_mass: bool = False
    observed: int | None = None
    peak: bool = False
    slopes: Tensor | None = None
    centre: Centre | None = None
    bias: Tensor | None = None

    @property
    def only_scales(self) -> bool:
        """Whether scores are only scaled, and the mass is not needed."""
        _, softcap, sinks, need_mass, _, _, slopes, centre, bias = self
        others = softcap is None and sinks is None and slopes is None
        return others and centre is None and bias is None and not need_mass
