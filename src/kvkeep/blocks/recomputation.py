"""Recomputes tokens of joined texts, so that they attend to the texts before them."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.blocks.join import windowed
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.host import Host, ModelCache, Narrowed
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs
from kvkeep.planes import POSITION, slot_count


class Blended(NamedTuple):
    """The positions that were recomputed, int64 (n,), ascending; and for candidates that were not,
    the distance of their keys and values from recomputed keys and values, as a relative norm."""

    positions: Tensor
    deviation: float


@torch.inference_mode()
def recompute(host: Host, cache: ModelCache, tokens: Tensor, positions: Tensor) -> None:
    """Recompute tokens of a joined cache, attending to all tokens before them.

    Args:
        host: host of an attached model.
        tokens: all tokens that the cache counts as fed, int64 (T,).
        positions: positions to recompute, int64 (n,), ascending; they must include all positions
            that the cache does not hold.

    Raises:
        UnsupportedError: the cache's spec or the model does not allow it.
        ShapeError: tokens or positions do not fit the cache.
        StateError: tokens were fed since the caches were joined.
    """
    _require(host, cache, tokens, positions)
    for layer in cache.layers:
        _replace(layer, positions)
    _feed(host, cache, tokens, positions)


@torch.inference_mode()
def blend(
    host: Host,
    cache: ModelCache,
    tokens: Tensor,
    candidates: Tensor,
    *,
    certain: Tensor,
    count: int,
) -> Blended:
    """Recompute the tokens whose keys and values would change most.

    All candidates go through the first layer. The second layer compares their new keys and values
    with the cache's. Only the tokens that differ most go through the rest of the second layer and
    the later layers.

    Args:
        tokens: all tokens that the cache counts as fed, int64 (T,).
        candidates: positions, int64 (n,), ascending; they must include all positions that the cache
            does not hold.
        certain: bool (n,), candidates that are always recomputed.
        count: number of further candidates to recompute.

    Raises:
        UnsupportedError, ShapeError, StateError: see `recompute`.

    Source: CacheBlend (arXiv 2405.16444), with one choice for all layers from the second on.
    """
    _require(host, cache, tokens, candidates[certain])
    if reason := why_not_compared(host):
        raise UnsupportedError(
            f"{type(host.model).__name__}: {reason}; use recompute='boundary:32' or 'all'"
        )
    own = cache.layers
    choice = _SecondLayer(own[1], candidates, certain, count)
    _replace(own[0], candidates)
    others: list[Any] = [choice, *(_LaterLayer(layer, choice) for layer in own[2:])]
    cache.layers = [own[0], *others]
    try:
        with host.narrowed(2, len(candidates), choice.narrowed):
            _feed(host, cache, tokens, candidates)
    finally:
        cache.layers = own
    return Blended(choice.chosen, choice.deviation)


class _LayerProxy:
    """Takes the place of a layer during one forward. Until the layer's step has run, the cursor
    does not count the candidates."""

    def __init__(self, layer: LayerCache, candidates: Tensor) -> None:
        self._layer, self.candidates, self._stepped = layer, candidates, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def cursor(self) -> Cursor:
        cursor = self._layer.cursor
        if self._stepped:
            return cursor
        before = copy(cursor)
        before.history = self._layer.history
        before.history.columns -= len(self.candidates)
        return before

    @property
    def fed(self) -> int:
        return self.cursor.history.columns


class _LaterLayer(_LayerProxy):
    """A layer after the second: its step replaces the slots of the chosen tokens."""

    def __init__(self, layer: LayerCache, choice: _SecondLayer) -> None:
        super().__init__(layer, choice.candidates)
        self._choice = choice

    def run(self, inputs: StepInputs) -> Tensor:
        self._stepped = True
        _replace(self._layer, self._choice.chosen)
        return self._layer.run(inputs)


class _SecondLayer(_LayerProxy):
    """The second layer: it computes all candidates, and chooses the certain tokens and the tokens
    whose keys and values differ most."""

    def __init__(self, layer: LayerCache, candidates: Tensor, certain: Tensor, count: int) -> None:
        super().__init__(layer, candidates)
        self._certain = certain
        self._count = min(len(candidates), int(certain.sum()) + count)
        self.index = candidates[:0]  # indices of the chosen candidates
        self.deviation = 0.0

    @property
    def chosen(self) -> Tensor:
        """Positions of the chosen candidates."""
        return self.candidates[self.index]

    def narrowed(self) -> Narrowed:
        """The tokens that go through the later layers."""
        return Narrowed(self.index, self.chosen)

    def run(self, inputs: StepInputs) -> Tensor:
        layer, self._stepped = self._layer, True
        assert inputs.position is not None
        differ, norm = self._compared(inputs.k, inputs.v)
        self.index = differ.topk(self._count).indices.sort().values
        left = torch.ones(len(differ), dtype=torch.bool).index_fill_(0, self.index, False)
        whole = float(norm[left].sum())
        self.deviation = (float(differ[left].sum()) / whole) ** 0.5 if whole else 0.0
        _replace(layer, self.chosen)
        at = self.index
        q, k, v = (x[:, :, at] for x in inputs[:3])
        found = layer.run(inputs._replace(q=q, k=k, v=v, position=inputs.position[at]))
        out = found.new_zeros(*inputs.q.shape[:3], found.shape[3])
        out[:, :, at] = found
        return out

    def _compared(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """For each candidate: the squared distance of its cached keys and values from the new keys
        and values, infinite if it is certain; and the squared norm of the new keys and values."""
        layer = self._layer
        planes = layer.state().parts["slots"]
        slot = torch.searchsorted(planes[POSITION][0, 0], self.candidates.to(torch.int32))
        slot = slot.clamp(max=slot_count(planes) - 1)  # for candidates after all cached tokens
        differ, norm = torch.zeros(2, len(slot), device=k.device)
        held = layer.codecs.decode(planes, torch.float32)
        for old, new in zip(held, (k, v), strict=True):
            differ += (old[:, :, slot] - new.float()).square().sum(dim=(0, 1, 3))
            norm += new.float().square().sum(dim=(0, 1, 3))
        return differ.cpu().masked_fill(self._certain, torch.inf), norm.cpu()


def why_not_compared(host: Host) -> str:
    """Why the second layer cannot estimate how much a token's keys and values would change; empty
    if it can."""
    if host.parallel:
        return "each process would compare tokens by its own heads, and choose different tokens"
    if not host.narrows or len(host.kinds) < 2:
        return "the model has no second layer to compare tokens in"
    return ""


def _replace(layer: LayerCache, positions: Tensor) -> None:
    """Hide the slots at `positions` in frozen runs, so that these tokens can be fed again."""
    history = layer.history
    history.floor = history.columns  # the newest slots are no longer the newest tokens
    history.columns -= len(positions)
    layer.cursor.adopt_frozen(history, [run.without(positions) for run in layer.slots.frozen.runs])


def _feed(host: Host, cache: ModelCache, tokens: Tensor, positions: Tensor) -> None:
    host.feed(tokens[positions][None].to(host.device), cache, position=positions)


def require_repairable(host: Host, cache: ModelCache) -> None:
    """Raise UnsupportedError if tokens in a cache of these specs cannot be recomputed."""
    if not host.attached:
        raise UnsupportedError(
            "only an attached model can recompute tokens; call kvkeep.attach(model)"
        )
    windows = windowed(cache)
    if windows:
        raise UnsupportedError(
            f"{windows}, where tokens cannot be recomputed; use recompute=0 with texts that "
            "fit the window, or recompute='all'"
        )
    evicting = next((x.policy for x in cache.layers if x.policy.evicts), None)
    if evicting is not None:
        raise UnsupportedError(
            f"policy {evicting.name} evicts, and would treat recomputed tokens as the newest; use "
            "keep_all"
        )


def _require(host: Host, cache: ModelCache, tokens: Tensor, certain: Tensor) -> None:
    require_repairable(host, cache)
    if tokens.shape != (cache.fed,):
        raise ShapeError(
            f"tokens {tuple(tokens.shape)} of a cache that was fed {cache.fed}; give all tokens"
        )
    held = cache.layers[0].positions()[0, 0].cpu()
    if any(layer.slots.storage.length for layer in cache.layers) or bool((held < 0).any()):
        raise StateError("tokens were fed after the caches were joined; recompute before feeding")
    known = torch.zeros(len(tokens), dtype=torch.bool)
    known[held.long()] = known[certain] = True
    missing = int((~known).sum())
    if missing:
        raise ShapeError(
            f"{missing} of {len(tokens)} tokens are neither in the cache nor among the positions "
            "to compute; give their positions too"
        )
