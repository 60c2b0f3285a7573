"""Replaying: the forward of an attached model on a GPU; in `generate()` it replays CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvkeep.errors import CapacityError, UnsupportedError
from kvkeep.features import Feature
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import OF_GENERATE, cache_in, name_in
from kvkeep.hf.config import decoder_of
from kvkeep.hf.generation.calls import CALL, Call
from kvkeep.hf.kinds import kinds_of, why_not
from kvkeep.hf.steps.cuda_graph import Replay
from kvkeep.hf.steps.replaced_forward import ReplacedForward
from kvkeep.host.hooks import foreign_hooks

_LEAST = 16
"""The fewest tokens to generate for which a graph is captured: capturing takes a step or two."""

_CACHE = name_in(CausalLMOutputWithPast) or OF_GENERATE

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def replays(model: PreTrainedModel) -> bool:
    """Whether a model's `generate()` may replay its steps: the whole model is on one GPU, its
    forward is its class's, and kvkeep's hooks run within that forward."""
    devices = set(getattr(model, "hf_device_map", {"": model.device}).values())
    own = "forward" not in vars(model) and decoder_of(model) is not model
    return own and on_gpu(model) and len(devices) == 1


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether a model is on a device that supports graphs."""
    return model.device.type == "cuda"


class Replaying(ReplacedForward):
    """The `forward` of an attached model on a GPU.

    In a `generate()` call in greedy or sampling mode, steps of one token a row run as `Graphed`
    steps, with growing storage too. The cache becomes ordinary again when the call ends, or as soon
    as its layers are needed. If a model or a cache needs the host in a step, the model's own
    forward runs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._possible = not why_not(kinds_of(model.config), Feature.GRAPHED)

    def __reduce__(self) -> tuple[Any, ...]:
        return Replaying, (self.model,)

    def plan(self, call: Call, cache: Cache, config: Any, mode: Any, columns: int) -> None:
        """Let a call of `generate()` replay its steps, if possible. transformers then does not
        compile them.

        Args:
            call: the current call.
            cache: the cache of its steps.
            config: its generation config.
            mode: its generation mode.
            columns: the most columns that its cache will hold.
        """
        if (
            self._possible
            and mode in _MODES
            and config.compile_config is None
            and not (cache.written_out or config.output_hidden_states)
            and not foreign_hooks(self.model)
            and columns - call.columns >= _LEAST
        ):
            config.disable_compile = True
            call.replay = Replay(cache, columns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = CALL.get()
        replay = None if call is None or call.model is not self.model else call.replay
        if replay is None or replay.running or torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        given = self.by_name(args, kwargs)
        logits = None
        if self._possible and cache_in(given) is replay.cache and self.is_step(given):
            try:
                logits = replay.step(self.model, given["input_ids"], given.get("position_ids"))
            except UnsupportedError:  # the token was not fed
                self._possible = False
            except CapacityError:  # the token was not fed: the ordinary cache may have room
                pass
        if logits is None:
            replay.close()
            return self.own(*args, **kwargs)
        return CausalLMOutputWithPast(logits=logits[:, None], **{_CACHE: replay.cache})  # type: ignore[arg-type]
