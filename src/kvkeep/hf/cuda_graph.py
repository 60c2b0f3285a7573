"""Graphed: a model's decode step over a cache, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.graph.device_step import Cursors, DeviceStep, require_fitting
from kvkeep.hf.cache import Cache
from kvkeep.hf.config import decoder_config, is_routed

_EAGER_STEPS = 2
"""Steps before the graph is captured: kernels are compiled, and allocators find their sizes."""


_LENT = "is lent to graphed steps; close() them first"


class Graphed:
    """Decode steps of one token a row, whose whole state stays on the device.

    On CUDA the first two steps run as they are, the third is captured as a CUDA graph, and from
    then on a step is one launch. Elsewhere all run as they are. Nothing waits for the device.

    Args:
        model: attached, see `kvkeep.attach`.
        cache: holds a prompt, in fixed storage; it is lent until `close`.
        compile: compile the model by `torch.compile` too, which joins its small operations.

    Raises:
        StateError: the model is not attached, or the cache is empty or lent already.
        SpecError, UnsupportedError: a layer needs the host between steps; nothing is changed.

    Use it as a context manager, or `close` it: the cache then holds all tokens that were fed.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, *, compile: bool = False) -> None:
        if not is_routed(decoder_config(model.config)):
            raise StateError("the model is not attached; call kvkeep.attach(model) first")
        if not cache.fed:
            raise StateError("the cache is empty; feed the prompt through the model first")
        device = model.device
        if any(layer.slots.segments()[-1].position.device != device for layer in cache.layers):
            raise UnsupportedError("a cache on several devices; graphed steps need one")
        self.model, self.cache = model, cache
        for layer in cache.layers:
            require_fitting(layer)
        self._layers = cache.layers
        with torch.inference_mode(False):
            self._cursors = Cursors(torch.tensor(cache.fed, device=device))
            self._token = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self._steps_on_device = [DeviceStep(layer, self._cursors) for layer in self._layers]
        self._forward: Callable[..., Any] = model
        if compile:
            self._forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._steps = 0
        self._whole = True  # whether all layers were fed alike
        self._tickets, cache._traced = cache._traced, list(self._steps_on_device)
        self._closed, cache.lent = False, _LENT

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Feed one token a row, int64 (B, 1); returns the logits (B, V) of the next.

        Raises:
            ShapeError: other than one token for each row.
            CapacityError: the cache is full; nothing was fed.
            StateError: it was closed.
        """
        if self._closed:
            raise StateError("these steps were closed; make new ones: Graphed(model, cache)")
        if input_ids.shape != self._token.shape:
            raise ShapeError(
                f"token ids {tuple(input_ids.shape)}: one for each row, {tuple(self._token.shape)}"
            )
        if not self._whole:
            raise StateError("a step was interrupted: close() these, and feed the prompt again")
        for step in self._steps_on_device:
            step.require(1)
        self._whole = False
        with torch.inference_mode():
            self._token.copy_(input_ids)
            if self._token.is_cuda and self._steps >= _EAGER_STEPS:
                logits = self._replayed()
            else:
                logits = self._run()
        self._steps += 1
        for step in self._steps_on_device:
            step.count(1)
        self._whole = True
        return logits

    def close(self) -> None:
        """Give the cache back, with all that was fed; empty, if a step was interrupted. The graph
        is freed."""
        if self._closed:
            return
        self._graph = self._logits = None
        self._closed, self.cache.lent, self.cache._traced = True, "", self._tickets
        with torch.inference_mode():
            for step in self._steps_on_device:
                step.close()
        if not self._whole:
            self.cache.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Tensor:
        """One step, launched operation by operation."""
        position = self._steps_on_device[0].next_positions(1).expand(len(self._token), 1)
        with self._borrowed():
            logits: Tensor = self._forward(
                input_ids=self._token,
                attention_mask=position[:, None, None],
                position_ids=position.to(torch.int64),
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]
        self._cursors.advance()
        self.cache._feeding = None  # the lent layers do not count what is fed
        return logits

    def _replayed(self) -> Tensor:
        with torch.cuda.device(self._token.device):
            if self._graph is None:
                self._capture()
            assert self._graph is not None
            assert self._logits is not None
            self._graph.replay()
            return self._logits.clone()

    def _capture(self) -> None:
        """Record a step, which runs nothing.

        Raises:
            UnsupportedError: the model asks the host for something, which no graph can hold.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of this device, which the default one may not be
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._logits = self._run()
        except Exception as error:
            torch.cuda.set_stream(before)  # torch leaves the other when a capture fails
            self._whole, self.cache._handed = True, None
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be captured as a CUDA graph: {reason}; this "
                "token was not fed: close() these steps and call the model itself"
            ) from error
        self._graph = graph

    @contextmanager
    def _borrowed(self) -> Any:
        """The layers, for the model's own calls."""
        self.cache.lent = ""
        try:
            yield
        finally:
            self.cache.lent = _LENT
