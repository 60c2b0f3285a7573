"""Graphed: a decode step as one CUDA graph; Replay: the graphed steps of a `generate()` call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.errors import KVKeepError, ShapeError, StateError, UnsupportedError, reason_of
from kvkeep.features import Feature
from kvkeep.graph.device_step import Cursors, DeviceStep, require_fitting
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.config import decoder_config, is_routed
from kvkeep.hf.forward.placing import as_counted
from kvkeep.hf.kinds import require
from kvkeep.hf.kinds.multimodal import require_counted

_EAGER_STEPS = 2
"""Steps before the graph is captured, to compile kernels and fill the allocator's pools."""

_MOST_CAPTURES = 2
"""The most captures in one `generate()`: a use of the layers between steps requires a new one."""


class Graphed:
    """Decode steps of one token per row, with all state on the device.

    On CUDA the first two steps run eagerly, the third is captured as a CUDA graph, and from then on
    a step is one launch. On other devices all steps run eagerly. No step waits for the device.

    Args:
        model: an attached model, see `kvkeep.attach`.
        cache: a cache with fixed or growing storage that holds a prompt; its layers cannot be used
            until `close`.
        compile: also compile the model with `torch.compile`, which fuses its small operations.
        tokens: the most tokens to feed, for which growing storage reserves slots; None: the storage
            must be fixed.
        yielding: close when other code uses the layers of the cache; False: raise an error.

    Attributes:
        closed: whether these steps have ended.

    Raises:
        StateError: the model is not attached, or the cache is empty or in use by other steps.
        SpecError, UnsupportedError: a layer needs the host between steps; nothing is changed.
        OutOfMemoryError: there is no room for `tokens` tokens.

    Use it as a context manager, or `close` it: the cache then holds all tokens that were fed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        *,
        compile: bool = False,
        tokens: int | None = None,
        yielding: bool = False,
    ) -> None:
        if not is_routed(decoder_config(model.config)):
            raise StateError("the model is not attached; call kvkeep.attach(model) first")
        if not cache.fed:
            raise StateError("the cache is empty; feed the prompt through the model first")
        require(model, Feature.GRAPHED, "call the model itself")
        require_counted(model, cache, "graphed steps")
        device = model.device
        if any(layer.slots.segments()[-1].position.device != device for layer in cache.layers):
            raise UnsupportedError(
                "the cache is on several devices; graphed steps need all of it on the model's"
            )
        self.model, self.cache = model, cache
        for layer in cache.layers:
            require_fitting(layer, tokens)
        self._layers = cache.layers
        with torch.inference_mode(False):
            self._cursors = Cursors(torch.tensor(cache.fed, device=device))
            self._token = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self._steps_on_device = [DeviceStep(layer, self._cursors, tokens) for layer in self._layers]
        self._forward: Callable[..., Any] = model
        if compile:
            self._forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._steps = 0
        self._complete = True  # False during a step, and after an interrupted step
        self._tickets, cache._traced = cache._traced, list(self._steps_on_device)
        self.closed, self._yielding = False, yielding
        self._fed_before = cache.fed
        cache.lent = self

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Feed one token per row, int64 (B, 1); returns the logits (B, V) of the next token.

        Raises:
            ShapeError: `input_ids` is not one token for each row.
            CapacityError: the cache is full; nothing was fed.
            StateError: these steps were closed, or a step was interrupted.
        """
        if self.closed:
            raise StateError("these steps were closed; create new ones: Graphed(model, cache)")
        if input_ids.shape != self._token.shape:
            raise ShapeError(
                f"token ids of shape {tuple(input_ids.shape)}; give one token for each row, "
                f"{tuple(self._token.shape)}"
            )
        if not self._complete:
            raise StateError(
                "a step was interrupted; close() these steps, and feed the prompt again"
            )
        for step in self._steps_on_device:
            step.require(1)
        self._complete = False
        with torch.inference_mode():
            self._token.copy_(input_ids)
            if self._token.is_cuda and self._steps >= _EAGER_STEPS:
                logits = self._replayed()
            else:
                logits = self._run()
        self._steps += 1
        for step in self._steps_on_device:
            step.count(1)
        self._complete = True
        return logits

    @property
    def fed(self) -> int:
        """Columns fed so far, padding included."""
        return self._fed_before + self._steps

    def give_back(self) -> None:
        """Called when the layers of the cache are needed.

        Raises:
            StateError: these steps do not yield.
        """
        if not self._yielding:
            raise StateError("the cache is in use by graphed steps; close() them first")
        self.close()

    def close(self) -> None:
        """Make the cache usable again, with all tokens that were fed, and free the graph. If a step
        was interrupted, the cache is reset."""
        if self.closed:
            return
        self._graph = self._logits = None
        self.closed, self.cache.lent, self.cache._traced = True, None, self._tickets
        with torch.inference_mode():
            for step in self._steps_on_device:
                step.close()
        if not self._complete:
            self.cache.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Tensor:
        """One step, launched operation by operation."""
        position = self._steps_on_device[0].next_positions(1).expand(len(self._token), 1)
        self.cache.lent = None  # the model's forward uses the cache's layers
        try:
            logits: Tensor = self._forward(
                input_ids=self._token,
                attention_mask=position[:, None, None],
                position_ids=as_counted(self.model, position),
                use_cache=True,
                **as_cache(self.model, self.cache),
            ).logits[:, -1]
        finally:
            self.cache.lent = self
        self._cursors.advance()
        self.cache._feeding = None  # the cache's layers do not count tokens during these steps
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
        """Capture a step as a CUDA graph, without running it.

        Raises:
            UnsupportedError: the model needs the host during a step, which a graph cannot do.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the default capture stream may be on another device
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._logits = self._run()
        except Exception as error:
            torch.cuda.set_stream(before)  # torch does not restore the stream if a capture fails
            self._complete, self.cache.handed = True, None
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be captured as a CUDA graph: "
                f"{reason_of(error)}; this token was not fed: close() these steps and call the "
                "model itself"
            ) from error
        self._graph = graph


class Replay:
    """The replayed steps of one call of `generate()`.

    Args:
        cache: the cache of these steps.
        columns: the most columns that it will hold.
    """

    def __init__(self, cache: Cache, columns: int) -> None:
        self.cache, self._columns = cache, columns
        self.running = False  # whether a step is running, which calls the model's own forward
        self._steps: Graphed | None = None
        self._begun = 0  # number of times that `_steps` was created

    def step(self, model: PreTrainedModel, ids: Tensor, position: Tensor | None) -> Tensor | None:
        """The logits (B, V) of a step with token ids (B, 1) at positions (B, 1). None, with nothing
        changed: the cache or the positions are not supported.

        Raises:
            UnsupportedError: the model needs the host in a step; the token was not fed.
            CapacityError: the cache is full; the token was not fed.
        """
        if self._steps is None or self._steps.closed:
            self._steps = self._begin(model, ids, position)
        if self._steps is None:
            return None
        self.running = True
        try:
            return self._steps(ids)
        finally:
            self.running = False

    def _begin(
        self, model: PreTrainedModel, ids: Tensor, position: Tensor | None
    ) -> Graphed | None:
        cache = self.cache
        left, self._begun = self._columns - cache.fed, self._begun + 1
        if self._begun > _MOST_CAPTURES or left < 1 or len(ids) != cache.rows:
            return None
        if cache.activation is not None or cache.offset is not None:
            return None
        own = cache.layers[0].next_positions(1, ids.device)
        if position is not None and not bool((position == own).all()):
            return None
        try:
            return Graphed(model, cache, tokens=left, yielding=True)
        except (KVKeepError, torch.OutOfMemoryError):
            self._begun = _MOST_CAPTURES
            return None

    def close(self) -> None:
        """Make the cache ordinary again."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
