"""A rehearsal checks, before a model's first forward, whether its attention can use a cache.

A copy of the decoder is built from its config, with the same classes and layers, but without
weights: each weight is one number, expanded to the weight's shape. The copy runs two short
forwards, in which matrix products return fixed numbers of the right shape, so that neither time nor
memory depends on the width of the model. Everything else is computed: masks, routing of experts,
rotary embeddings, and the calls of the cache and of the attention function. The model itself is not
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvkeep.attention import Attend
from kvkeep.errors import KVKeepError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config, recurrent_numbers
from kvkeep.hf.handover import Handed
from kvkeep.hf.latent import LatentStep
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs

_ROWS, _CHUNKS = 3, (2, 1)
_EAGER = "eager"
_SMALL = 1 << 16
"""Most elements of a buffer that is allocated in full, so that a forward may write to it."""

_passed: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
"""The configs with which decoders have passed a rehearsal."""


def rehearse(decoder: PreTrainedModel, implementation: str) -> str | None:
    """The reason why a decoder cannot use a kvkeep cache; empty if it can. None: unknown, because
    the copy without weights does not run with transformers' own cache either.

    Args:
        implementation: the attention implementation that the decoder will get.
    """
    described = f"{implementation} {decoder.config.to_dict()}"
    if _passed.get(decoder) == described:
        return ""
    with cheap_forwards():
        try:
            copied = without_weights(decoder)
        except Exception:  # a constructor's error says nothing about the attention
            return None
        fault = _fault(copied, implementation)
    if fault == "":
        _passed[decoder] = described
    return fault


def serves_unattached(decoder: PreTrainedModel) -> bool:
    """Whether the decoder can use a kvkeep cache without being attached."""
    with cheap_forwards():
        try:
            _forwards(without_weights(decoder), Cache)
        except Exception:
            return False
    return True


def _fault(decoder: PreTrainedModel, implementation: str) -> str | None:
    text = decoder_config(decoder.config)
    text._attn_implementation = implementation
    try:
        _forwards(decoder, _CountingCache)
    except KVKeepError as error:
        return str(error).partition("; ")[0]
    except Exception as error:
        text._attn_implementation = _EAGER
        try:
            _forwards(decoder, lambda config: DynamicCache(config=config))
        except Exception:
            return None
        reason = " ".join(str(error).split())[:200]
        return f"with a kvkeep cache its forward raises {type(error).__name__}: {reason}"
    return ""


class _CountingCache(Cache):
    """A cache that counts how a decoder uses each layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._given: Counter[int] = Counter()
        self._attended: Counter[int] = Counter()
        self._read: Counter[int] = Counter()
        self._begun: list[tuple[int, LatentStep]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        place, layer_idx = layer_idx, self._index.get(layer_idx, -1)
        if layer_idx < 0:
            raise UnsupportedError(f"it has more layers than the {len(self)} in its config")
        self._given[layer_idx] += 1
        found = super().update(key_states, value_states, place, *args, **kwargs)
        handed: Handed | None = getattr(found[0], "kvkeep", None)
        if isinstance(self._handed, LatentStep):
            self._begun.append((layer_idx, self._handed))
        elif handed is None:
            self._attended[layer_idx] += 1
        else:
            layer = _CheckedLayer(
                self.layers[layer_idx],
                found,
                lambda: self._attended.update([layer_idx]),
                lambda: self._read.update([layer_idx]),
            )
            handed.layer = cast(LayerCache, layer)
            handed.shared = layer
        return found

    def require_complete(self) -> None:
        """Raise UnsupportedError unless a forward fed each layer, and attended in it, exactly
        once, and layers that reuse its keys attended to them as its config says."""
        self._attended.update(index for index, step in self._begun if step.taken)
        self._begun.clear()
        for index in range(len(self)):
            given, attended = self._given[index], self._attended[index]
            if given != 1:
                times = "more than once" if given else "no keys"
                raise UnsupportedError(f"layer {index} gives {times} to its cache in a forward")
            if attended != 1:
                raise UnsupportedError(
                    f"layer {index} computes attention elsewhere, not in transformers' "
                    "AttentionInterface"
                )
            read, readers = self._read[index], self.layers[index].readers
            if read != readers:
                raise UnsupportedError(
                    f"{read} layers reuse the keys of layer {index} where its config says {readers}"
                )
        if self.recurrent is not None:
            kept = {int(name.partition(".")[0]) for name in self.recurrent.tensors()}
            for place, number in enumerate(recurrent_numbers(self.config)):
                if number and place not in kept:
                    raise UnsupportedError(f"layer {place} keeps its state outside of the cache")
        for counted in (self._given, self._attended, self._read):
            counted.clear()


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

    @property
    def unread(self) -> int:
        """See `ReadAgain`."""
        return self._layer.unread

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
        if not all(
            bool(x.isclose(y, rtol=0, atol=0, equal_nan=True).all())
            for x, y in zip((k, v), self._given, strict=True)
        ):
            raise UnsupportedError("its keys or values are changed in place after the cache")
        return run(inputs, lambda *_: (_numbers((*q.shape[:3], v.shape[3]), q), None))


def _forwards(decoder: PreTrainedModel, new_cache: Callable[[PreTrainedConfig], Any]) -> None:
    cache = new_cache(decoder.config)
    for n in _CHUNKS:
        inputs = {"input_ids": torch.zeros(_ROWS, n, dtype=torch.int64)}
        if isinstance(cache, _CountingCache):
            cache.begin_forward(decoder, inputs)
        decoder(**inputs, past_key_values=cache, use_cache=True)
        if isinstance(cache, _CountingCache):
            cache.require_complete()
            cache.end_forward()


@contextmanager
def cheap_forwards() -> Iterator[None]:
    """Run the enclosed code without matrix products, gradients or autocast, and without changing
    the state of the random number generator."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        _Products(),  # type: ignore[no-untyped-call]
    ):
        yield


def without_weights(decoder: PreTrainedModel) -> PreTrainedModel:
    """A decoder of the same class and config, whose weights use no memory."""
    config = deepcopy(decoder.config)
    decoder_config(config)._attn_implementation = _EAGER
    with torch.device("meta"):
        copied: PreTrainedModel = type(decoder)(config).eval()
    for module in copied.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_filled(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _filled(buffer)
        for name, other in vars(module).items():
            if isinstance(other, Tensor) and other.is_meta:
                setattr(module, name, _filled(other))
    return copied


def _filled(like: Tensor) -> Tensor:
    number = 0.5 if like.is_floating_point() else 0
    one = torch.full((), number, dtype=like.dtype, device="cpu")
    filled = one.expand(like.shape)
    return filled.clone() if like.numel() <= _SMALL else filled


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device).view(shape)


_PRODUCTS: dict[str, Callable[..., tuple[int, ...]]] = {
    "aten::mm": lambda a, b, *_: (a.shape[0], b.shape[1]),
    "aten::addmm": lambda _, a, b, *__: (a.shape[0], b.shape[1]),
    "aten::bmm": lambda a, b, *_: (*a.shape[:2], b.shape[2]),
    "aten::baddbmm": lambda _, a, b, *__: (*a.shape[:2], b.shape[2]),
    "aten::_grouped_mm": lambda a, b, *_: (a.shape[0], b.shape[-1]),
    "transformers::grouped_mm_fallback": lambda a, b, *_: (a.shape[0], b.shape[-1]),
}
"""The shapes of the results of matrix products, by their operators."""


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the results of matrix products by fixed numbers of the right shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shape = _PRODUCTS.get(func._schema.name)
        if shape is None or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        return _numbers(shape(*args), args[0])
