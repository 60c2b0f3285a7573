"""Compute some tokens of joined texts again, so that they know of the texts before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import is_routed
from kvkeep.hf.masks import MaskRequest
from kvkeep.layer import LayerCache
from kvkeep.planes import part


@torch.inference_mode()
def recompute(model: PreTrainedModel, cache: Cache, tokens: Tensor, positions: Tensor) -> None:
    """Compute tokens of a joined cache again, now that they see all before them.

    Args:
        model: the attached model.
        tokens: all that the cache was fed, int64 (T,).
        positions: of those to compute again, int64 (n,), ascending.
    """
    _require(model, cache, tokens)
    for layer in cache.layers:
        _replace(layer, positions)
    _feed(model, cache, tokens, positions)


@torch.inference_mode()
def blend(model: PreTrainedModel, cache: Cache, tokens: Tensor, first: int, count: int) -> Tensor:
    """Compute those tokens again that differ most from what they would be, layer by layer.

    All tokens from position `first` on pass through the first layer. In the second their keys and
    values are compared with what is held, and from there on the `count` that differ most go on.

    Returns:
        Their positions, int64 (count,), ascending.

    Source: CacheBlend (arXiv 2405.16444), with one choice for all layers from the second on.
    """
    _require(model, cache, tokens)
    if len(cache.layers) < 2:
        raise UnsupportedError("a model of one layer has nothing to compare; use boundary or all")
    candidates = torch.arange(first, len(tokens))
    own = cache.layers
    choice = _Choice(own[1], candidates, min(count, len(candidates)))
    _replace(own[0], candidates)
    others: list[Any] = [choice, *(_Later(layer, choice) for layer in own[2:])]
    cache.layers = [own[0], *others]
    try:
        with _narrowed(model, choice):
            _feed(model, cache, tokens, candidates)
    finally:
        cache.layers = own
    return choice.chosen


class _Stand:
    """Stands for a layer in one forward; until its step comes, as if its slots were taken back."""

    def __init__(self, layer: LayerCache, candidates: Tensor) -> None:
        self._layer, self.candidates, self._stepped = layer, candidates, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def fed(self) -> int:
        return self._layer.fed - (0 if self._stepped else len(self.candidates))


class _Later(_Stand):
    """A layer, of whose slots the chosen ones are replaced when they come."""

    def __init__(self, layer: LayerCache, choice: _Choice) -> None:
        super().__init__(layer, choice.candidates)
        self._choice = choice

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **options: Any) -> Tensor:
        self._stepped = True
        _replace(self._layer, self._choice.chosen)
        return self._layer.step(q, k, v, position, **options)


class _Choice(_Stand):
    """The second layer: it is given all candidates and goes on with those that differ most."""

    def __init__(self, layer: LayerCache, candidates: Tensor, count: int) -> None:
        super().__init__(layer, candidates)
        self._count = count
        self.index = candidates[:0]  # of the chosen among the candidates

    @property
    def chosen(self) -> Tensor:
        """Their positions."""
        return self.candidates[self.index]

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, **options: Any) -> Tensor:
        layer, self._stepped = self._layer, True
        planes = layer.state().parts["slots"]
        differ = torch.zeros(len(self.candidates), device=k.device)
        for codec, name, new in ((layer.key_codec, "k", k), (layer.value_codec, "v", v)):
            held = codec.decode(part(planes, name), torch.float32)[:, :, self.candidates]
            differ += (held - new.float()).square().sum(dim=(0, 1, 3))
        self.index = differ.topk(self._count).indices.sort().values.cpu()
        _replace(layer, self.chosen)
        at = self.index
        found = layer.step(q[:, :, at], k[:, :, at], v[:, :, at], position[at], **options)
        out = found.new_zeros(*q.shape[:3], found.shape[3])
        out[:, :, at] = found
        return out


@contextmanager
def _narrowed(model: PreTrainedModel, choice: _Choice) -> Iterator[None]:
    """The third layer and those after it get the chosen tokens only."""
    stack = _stack(model)

    def narrow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = len(choice.candidates)

        def chosen(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(chosen, x))
            asked: MaskRequest | None = getattr(x, "kvkeep", None)
            if asked is not None:
                return _positions(choice.chosen, asked.window)
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == count:
                return x[:, choice.index]
            return x

        return chosen(args), {name: chosen(x) for name, x in kwargs.items()}

    hooks = [layer.register_forward_pre_hook(narrow, with_kwargs=True) for layer in stack[2:]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stack(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers."""
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedError(
            f"{type(decoder).__name__} has no list of layers; use recompute='boundary:32' or 'all'"
        )
    return list(layers)


def _replace(layer: LayerCache, positions: Tensor) -> None:
    """Make room for tokens at some positions: those that are there are hidden."""
    ledger = layer.state().ledger
    ledger.floor = ledger.columns  # the newest slots are no longer the newest tokens
    ledger.columns -= len(positions)
    layer.adopt(ledger, frozen=[run.without(positions) for run in layer.frozen])


def _positions(positions: Tensor, window: int | None) -> Tensor:
    """Positions (n,) as the attention of an attached model takes them."""
    place = positions.to(torch.int32)
    found: Any = place.view(1, 1, 1, -1).clone()
    found.kvkeep = MaskRequest(window, place)
    return found  # type: ignore[no-any-return]


def _feed(model: PreTrainedModel, cache: Cache, tokens: Tensor, positions: Tensor) -> None:
    decoder: Callable[..., Any] = model.get_decoder()
    decoder(
        input_ids=tokens[positions][None].to(model.device),
        attention_mask=_positions(positions, None),
        position_ids=positions[None].to(model.device),
        past_key_values=cache,
        use_cache=True,
    )


def _require(model: PreTrainedModel, cache: Cache, tokens: Tensor) -> None:
    if not is_routed(cache.config):
        raise UnsupportedError("tokens are computed again by attached models; kvkeep.attach(model)")
    if tokens.shape != (cache.fed,):
        raise ShapeError(f"tokens {tuple(tokens.shape)} of a cache that was fed {cache.fed}")
    if any(layer.length != layer.fed or layer.storage.length for layer in cache.layers):
        raise StateError("the cache went on since it was joined; recompute before anything is fed")
    if any(layer.window is not None for layer in cache.layers):
        raise UnsupportedError("layers with windows of their own are not computed again")
