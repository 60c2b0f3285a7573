"""A rehearsal checks, before a model's first forward, whether its attention can use a cache.

It compares the results of a copy of the decoder without weights (`weightless.py`) with a cache,
chunk by chunk, and without a cache. The model itself is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvkeep.attention import Attend
from kvkeep.errors import KVKeepError, UnsupportedError, reason_of
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config
from kvkeep.hf.forward.inline import route_inline
from kvkeep.hf.handover import Handed
from kvkeep.hf.kinds import kinds_of, to_slots
from kvkeep.hf.weightless import EAGER, cheap_forwards, without_weights
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs

_ROWS, _CHUNKS = 3, (2, 1)
_OWN_CHUNKS, _OWN_WINDOW = (2, 2, 1), 2  # texts must be longer than the window
_SDPA = "sdpa"
_RELATIVE = 1e-3
"""The largest difference of results that rounding explains, relative to the largest result."""

_passed: WeakKeyDictionary[type[PreTrainedModel], set[str]] = WeakKeyDictionary()
"""The configs with which decoders of a class have passed a rehearsal. Copies without weights depend
only on class and config."""


def rehearse(decoder: PreTrainedModel, implementation: str) -> str | None:
    """The reason why a decoder cannot use a kvkeep cache; empty if it can; None: unknown, because
    the copy without weights fails with transformers' own cache too.

    Args:
        implementation: the attention implementation that the decoder will get.
    """

    def fault() -> str | None:
        try:
            copied = without_weights(decoder)
        except Exception:  # a failing constructor does not show that attention would fail
            return None
        return _fault(copied, implementation)

    return _once(decoder, implementation, fault)


def rehearse_own(decoder: PreTrainedModel) -> str:
    """The reason why the decoder's own attention cannot use a kvkeep cache, which then returns all
    keys and values in order; empty if it can."""
    return _once(decoder, "own", lambda: _own_fault(decoder)) or ""


def _once(decoder: PreTrainedModel, way: str, fault: Callable[[], str | None]) -> str | None:
    """The fault of a decoder in a rehearsal; no rehearsal if one has passed with this class and
    config."""
    described = f"{way} {decoder.config.to_dict()}"
    passed = _passed.setdefault(type(decoder), set())
    if described in passed:
        return ""
    with cheap_forwards():
        found = fault()
    if found == "":
        passed.add(described)
    return found


def _own_fault(decoder: PreTrainedModel) -> str:
    tokens = sum(_OWN_CHUNKS)
    padding = getattr(decoder_config(decoder.config), "pad_token_id", None) or 0
    ids = padding + 1 + torch.arange(_ROWS * tokens).view(_ROWS, tokens)
    chunks = torch.split(ids, list(_OWN_CHUNKS), dim=1)
    try:
        copied = without_weights(decoder, window=_OWN_WINDOW)
        used = decoder_config(decoder.config)._attn_implementation
        decoder_config(copied.config)._attn_implementation = _SDPA if used == _SDPA else EAGER
        expected = copied(input_ids=ids, use_cache=False)[0]
        for kind in kinds_of(copied):
            kind.attach(copied)
    except Exception as error:
        return f"it cannot be tried without weights: {_said(error)}"
    try:
        found = torch.cat(list(_outputs(copied, chunks, _CountingCache(copied.config))), dim=1)
    except UnsupportedError as error:
        return str(error).partition("; ")[0]
    except Exception as error:
        return f"its forward raises {_said(error)}"
    if not bool(expected.isfinite().all()):
        return "its results without weights are not finite"
    if float((found - expected).abs().max()) > _RELATIVE * float(expected.abs().max()):
        return "its results with a cache differ from its results without a cache"
    return ""


def _fault(decoder: PreTrainedModel, implementation: str) -> str | None:
    text = decoder_config(decoder.config)
    text._attn_implementation = implementation
    changes = [change for kind in kinds_of(decoder) for change in kind.attach(decoder)]
    changes += route_inline(decoder, implementation)
    try:
        _forwards(decoder, _CountingCache)
    except KVKeepError as error:
        said = str(error).partition("; ")[0]
        return said.replace(f"{text.model_type}'s attention", "its attention")
    except Exception as error:
        text._attn_implementation = EAGER
        for change in changes:
            change.remove()
        try:
            _forwards(decoder, lambda config: DynamicCache(config=config))
        except Exception:
            return None
        return f"with a kvkeep cache its forward raises {_said(error)}"
    return ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {reason_of(error)}"


class _CountingCache(Cache):
    """A cache that counts how a decoder uses each layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._given: Counter[int] = Counter()
        self._attended: Counter[int] = Counter()
        self._read: Counter[int] = Counter()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        place, layer_idx = layer_idx, self.model_layers.indices.get(layer_idx, -1)
        if layer_idx < 0:
            raise UnsupportedError(f"it has more layers than the {len(self.layers)} in its config")
        if self.handed is not None and not self.handed.taken:
            raise _elsewhere(layer_idx - 1)
        self._given[layer_idx] += 1
        found = super().update(key_states, value_states, place, *args, **kwargs)
        handed: Handed | None = getattr(found[0], "kvkeep", None)
        if handed is None:
            self._attended[layer_idx] += 1
        else:
            layer = _CheckedLayer(
                self.layers[layer_idx],
                to_slots(self.kinds, *found),
                lambda: self._attended.update([layer_idx]),
                lambda: self._read.update([layer_idx]),
            )
            handed.layer = cast(LayerCache, layer)
        return found

    def require_complete(self) -> None:
        """Raise UnsupportedError unless a forward fed each layer and attended in it exactly once,
        and the number of layers that reuse its keys is as the config says."""
        for index in range(len(self.layers)):
            given, attended = self._given[index], self._attended[index]
            if given != 1:
                times = "more than once" if given else "no keys"
                raise UnsupportedError(f"layer {index} gives {times} to its cache in a forward")
            if attended != 1:
                raise _elsewhere(index)
            read, readers = self._read[index], self.layers[index].cursor.readers
            if read != readers:
                raise UnsupportedError(
                    f"{read} layers reuse the keys of layer {index}, but its config says {readers}"
                )
        kept = {int(name.partition(".")[0]) for name in self.carried.tensors()}
        for place in sorted(self.carried.places - kept):
            raise UnsupportedError(f"layer {place} keeps its state outside of the cache")
        for counted in (self._given, self._attended, self._read):
            counted.clear()


def _elsewhere(index: int) -> UnsupportedError:
    return UnsupportedError(
        f"layer {index} computes attention elsewhere, not in transformers' AttentionInterface"
    )


class _CheckedLayer:
    """Stands in for a layer: its step checks the inputs and fills the cache, but computes no
    attention. `attended` and `read` count its steps and readings."""

    def __init__(
        self,
        layer: LayerCache,
        given: tuple[Tensor, Tensor],
        attended: Callable[[], None],
        read: Callable[[], None],
    ) -> None:
        self._layer, self._attended, self._read = layer, attended, read
        self._given = [x.clone() for x in given]
        self.window, self.next_positions = layer.window, layer.next_positions
        self.sighted = layer.sighted

    @property
    def cursor(self) -> Cursor:
        """See `ReadLayer`."""
        return self._layer.cursor

    def run(self, inputs: StepInputs) -> Tensor:
        """See `LayerCache.run`."""
        out = self._checked(self._layer.run, inputs)
        self._attended()
        return out

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """See `LayerCache.read`."""
        out = self._checked(self._layer.read, inputs)
        self._read()
        return out

    def _checked(self, run: Callable[..., Tensor], inputs: StepInputs) -> Tensor:
        q, k, v = inputs[:3]
        if not all(  # behind a key there may be the key of an index
            bool(x[..., : y.shape[-1]].isclose(y, rtol=0, atol=0, equal_nan=True).all())
            for x, y in zip((k, v), self._given, strict=True)
        ):
            raise UnsupportedError("its keys or values are changed in place after the cache")
        return run(inputs, lambda *_: (_numbers((*q.shape[:3], v.shape[3]), q), None))


def _forwards(decoder: PreTrainedModel, new_cache: Callable[[PreTrainedConfig], Any]) -> None:
    """Run the chunks of three texts of equal tokens."""
    ids = torch.zeros(_ROWS, sum(_CHUNKS), dtype=torch.int64)
    for _ in _outputs(decoder, torch.split(ids, list(_CHUNKS), dim=1), new_cache(decoder.config)):
        pass


def _outputs(decoder: PreTrainedModel, chunks: Iterable[Tensor], cache: Any) -> Iterator[Tensor]:
    """The decoder's output (B, n, D) for each chunk of token ids (B, n)."""
    for ids in chunks:
        given = {"input_ids": ids, "use_cache": True, **as_cache(decoder, cache)}
        if isinstance(cache, _CountingCache):
            for kind in cache.kinds:  # may change `given`
                kind.begin(cache, decoder, given)
        yield decoder(**given)[0]
        if isinstance(cache, _CountingCache):
            cache.require_complete()
            cache.end_forward()


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device).view(shape)
