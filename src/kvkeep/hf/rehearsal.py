"""A rehearsal checks, before a model's first forward, whether its attention can use a cache.

A copy of the decoder is built from its config, with the same classes and layers, but without
weights: each weight is one number, expanded to the weight's shape. In its place, products use a
matrix of rank one, so that neither time nor memory depends on the width of the model. Everything
else is computed: masks, routing of experts, rotary embeddings, and the calls of the cache and of
the attention function. So the copy is a model of the same kind, and what it computes through a
cache, chunk by chunk, can be compared with what it computes without one. The model itself is not
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, recurrent_numbers
from kvkeep.hf.handover import Handed
from kvkeep.hf.latent import LatentStep
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.step import StepInputs

_ROWS, _CHUNKS = 3, (2, 1)
_OWN_CHUNKS, _OWN_WINDOW = (2, 2, 1), 2  # so that the texts are longer than the window
_EAGER, _SDPA = "eager", "sdpa"
_RELATIVE = 1e-3
"""Largest difference of results that rounding explains, as a part of the largest result."""

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


def rehearse_own(decoder: PreTrainedModel) -> str:
    """The reason why the decoder's own attention cannot use a kvkeep cache, which then returns all
    keys and values in order; empty if it can."""
    described = f"own {decoder.config.to_dict()}"
    if _passed.get(decoder) == described:
        return ""
    with cheap_forwards():
        fault = _own_fault(decoder)
    if fault == "":
        _passed[decoder] = described
    return fault


def _own_fault(decoder: PreTrainedModel) -> str:
    tokens = sum(_OWN_CHUNKS)
    padding = getattr(decoder_config(decoder.config), "pad_token_id", None) or 0
    ids = padding + 1 + torch.arange(_ROWS * tokens).view(_ROWS, tokens)
    chunks = torch.split(ids, list(_OWN_CHUNKS), dim=1)
    try:
        copied = without_weights(decoder, window=_OWN_WINDOW)
        used = decoder_config(decoder.config)._attn_implementation
        decoder_config(copied.config)._attn_implementation = _SDPA if used == _SDPA else _EAGER
        expected = copied(input_ids=ids, use_cache=False)[0]
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
        return "its results through a cache are others than without one"
    return ""


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
        return f"with a kvkeep cache its forward raises {_said(error)}"
    return ""


def _said(error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {reason}"


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
            raise UnsupportedError(f"it has more layers than the {len(self.layers)} in its config")
        if self._handed is not None and not self._handed.taken:
            raise _elsewhere(layer_idx - 1)
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
        for index in range(len(self.layers)):
            given, attended = self._given[index], self._attended[index]
            if given != 1:
                times = "more than once" if given else "no keys"
                raise UnsupportedError(f"layer {index} gives {times} to its cache in a forward")
            if attended != 1:
                raise _elsewhere(index)
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

    @property
    def unread(self) -> int:
        """See `ReadAgain`."""
        return self._layer.cursor.unread

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
    """Run the chunks of three texts of equal tokens."""
    ids = torch.zeros(_ROWS, sum(_CHUNKS), dtype=torch.int64)
    for _ in _outputs(decoder, torch.split(ids, list(_CHUNKS), dim=1), new_cache(decoder.config)):
        pass


def _outputs(decoder: PreTrainedModel, chunks: Iterable[Tensor], cache: Any) -> Iterator[Tensor]:
    """What a decoder returns for each chunk of token ids (B, n): (B, n, D)."""
    for ids in chunks:
        if isinstance(cache, _CountingCache):
            cache.begin_forward(decoder, {"input_ids": ids})
        yield decoder(input_ids=ids, **as_cache(decoder, cache), use_cache=True)[0]
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


def without_weights(decoder: PreTrainedModel, *, window: int | None = None) -> PreTrainedModel:
    """A decoder of the same class and config, whose weights use no memory. Its buffers are those of
    the decoder.

    Args:
        window: the size of its sliding windows and chunks, if it has any; None: as in its config.
    """
    config = deepcopy(decoder.config)
    text = decoder_config(config)
    text._attn_implementation = _EAGER
    for name in ("sliding_window", "attention_chunk_size"):
        if window is not None and getattr(text, name, None) is not None:
            setattr(text, name, window)
    with torch.device("meta"):
        copied: PreTrainedModel = type(decoder)(config).eval()
    originals = dict(decoder.named_modules())
    for path, module in copied.named_modules():
        original = originals.get(path)
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_expanded(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _as_in(original, name, buffer)
        for name, other in vars(module).items():
            if isinstance(other, Tensor) and other.is_meta:
                setattr(module, name, _as_in(original, name, other))
    return copied


def _expanded(like: Tensor) -> Tensor:
    number = 0.5 if like.is_floating_point() else 0
    return torch.full((), number, dtype=like.dtype, device="cpu").expand(like.shape)


def _as_in(original: nn.Module | None, name: str, like: Tensor) -> Tensor:
    """A copy of a module's tensor, to which a forward may write, if it has numbers."""
    found = getattr(original, name, None)
    if type(found) is Tensor and found.shape == like.shape and not found.is_meta:
        return found.detach().to("cpu", copy=True)
    filled = _expanded(like)
    return filled.clone() if like.numel() <= _SMALL else filled


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device).view(shape)


def _is_expanded(x: Tensor) -> bool:
    return x.numel() > 1 and not any(x.stride())


_PRODUCTS: dict[str, int] = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_grouped_mm": 0,
    "transformers::grouped_mm_fallback": 0,
}
"""Operators of matrix products, and the place of the left matrix among their arguments."""


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives weights without memory the meaning of matrices of rank one, and of embeddings in which
    tokens differ."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::embedding" and _is_expanded(args[0]) and not args[0].is_meta:
            return _embedded(args[0], args[1])
        left = _PRODUCTS.get(name)
        if left is None or args[left].is_meta or not _is_expanded(args[left + 1]):
            return func(*args, **(kwargs or {}))
        return _product(args[left], args[left + 1], args[0] if left else None)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) times a matrix (..., K, M) of rank one."""
    k, m = (torch.arange(size, dtype=x.dtype, device=x.device) for size in weight.shape[-2:])
    reads = (1.7 * k).cos() * (2 / len(k)) ** 0.5
    product: Tensor = (x @ reads)[..., None] * (0.9 * m + 0.3).sin()
    return product if bias is None else product + bias


def _embedded(weight: Tensor, ids: Tensor) -> Tensor:
    width = torch.arange(1, weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)
    return (0.37 * (ids[..., None] + 1) * width).sin()
